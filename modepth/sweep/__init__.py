"""Sweeps at equal FLOPs: plan (pure), run (resumable), fit (numpy and scipy only)."""
