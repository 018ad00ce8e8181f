"""Speed and memory beside other implementations: `modepth bench`.

contest.py      which models meet at which shapes, in turns, and what comes of it
worker.py       one contestant in a process of its own
contestants/    how each is built: ours, transformers' Llama, ours converted, the peers
peers.py        environments for the peers, which need other versions than we do
"""
