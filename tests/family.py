"""Models with experts, early exit and the filter for the tests, and slow ways to compute them."""

import torch

from modepth.config import ExpertsConfig
from modepth.routing import num_routed
from tests.oracles import GATES, attend_masked, tiny_model, tiny_tokens, top_slowly

EXPERTS = {
    "token-choice": ExpertsConfig(num_experts=3, capacity_factor=1.3),
    "top-2": ExpertsConfig(num_experts=3, per_token=2),
    "expert-choice": ExpertsConfig(num_experts=3, choice="expert"),
    "reduced capacity": ExpertsConfig(num_experts=3, capacity_factor=0.5),
    "integrated": ExpertsConfig(num_experts=2, num_noops=3),
    "integrated, top-2": ExpertsConfig(num_experts=3, num_noops=2, per_token=2, layers=(1, 2, 4)),
}
FAMILY = {
    **{name: {"routing": None, "experts": experts} for name, experts in EXPERTS.items()},
    "staged": {"experts": EXPERTS["token-choice"], "capacity": 0.5, "cutoff": 0.3},
    "staged, expert-choice": {"experts": EXPERTS["expert-choice"], "part": "mlp", "capacity": 0.5, "cutoff": 0.3},
    "staged, attention": {"experts": EXPERTS["integrated"], "part": "attention", "capacity": 0.5, "cutoff": 0.3},
    "exit": {"flow": "exit", "capacity": 0.7, "cutoff": -1.0},
    "exit, with experts": {"flow": "exit", "capacity": 0.7, "cutoff": -1.0, "experts": EXPERTS["integrated"]},
    "filter": {"flow": "filter", "capacity": 0.7, "cutoff": -1.0},
    "filter, mlp": {"flow": "filter", "part": "mlp", "capacity": 0.7, "cutoff": -1.0},
}


def family_model(name, seed=0, **changes):
    """A small model of the family whose routers give widely different scores, cutoffs in their midst."""
    model = tiny_model(seed, **{**FAMILY[name], **changes}).eval()
    with torch.no_grad():
        for layer in model.layers:
            if model.config.experts is not None and hasattr(layer.mlp, "experts"):
                layer.mlp.router.score.weight.normal_(std=0.3)
                few = model.config.experts.capacity_factor < 1 or model.config.experts.choice == "expert"
                layer.mlp.router.cutoff_E.fill_(0.4 if few else 0.1)
    check_varied(model)
    return model


def check_varied(model):
    """Each layer that decides computes some tokens and not others, and each expert has some."""
    out = model(tiny_tokens(B=4))
    assert all(0 < routing.chosen_BT.sum() < routing.real_BT.sum() for routing in out.routings)
    for decided in out.experts:
        assert (decided.chosen_BTE.sum((0, 1)) > 0).all()
        assert not (decided.chosen_BTE | ~decided.real_BT.unsqueeze(-1)).all()


def experts_slowly(module, x_BTD, real_BT, mode):
    """One token and one expert at a time: the gated sum of what the experts make of a token, and who took it."""
    config, router = module.config, module.router
    E = config.num_experts
    out_BTD, taken_BTE = torch.zeros_like(x_BTD), torch.zeros(*x_BTD.shape[:2], E, dtype=torch.bool)
    for row, x_TD in enumerate(x_BTD):
        real = [token for token in range(len(x_TD)) if real_BT[row, token]]
        shares = {token: (router.score.weight @ x_TD[token]).softmax(0) for token in real}
        for expert in range(E):
            scores = {token: share[expert].item() for token, share in shares.items()}
            coming = real
            if config.choice == "token":
                picks = {
                    token: top_slowly(share.tolist(), range(len(share)), config.per_token)
                    for token, share in shares.items()
                }
                coming = [token for token in real if expert in picks[token]]
            if mode == "topk":
                members = top_slowly(scores, coming, num_routed(len(real), config.capacity))
            elif config.capacity == 1:
                members = coming
            else:
                members = [token for token in coming if scores[token] >= router.cutoff_E[expert]]
            for token in members:
                taken_BTE[row, token, expert] = True
                gate = shares[token][expert] * (E + config.num_noops) / config.per_token
                update = gate * module.experts[expert](x_TD[token])
                out_BTD[row, token] = out_BTD[row, token] + update
    return out_BTD, taken_BTE


def flow_slowly(model, tokens_BT, mode, lengths):
    """Logits of a model with flow filter or exit, every layer computing all tokens and hiding those that are out."""
    config, routing = model.config, model.config.routing
    x_BTD = model.embed_tokens(tokens_BT)
    real_BT = torch.arange(tokens_BT.shape[1]) < lengths[:, None]
    alive_BT, gate_BT = real_BT, torch.ones(real_BT.shape)
    for number, layer in enumerate(model.layers):
        inside_BT = alive_BT if routing.flow == "exit" else real_BT
        gate_BT = torch.ones(real_BT.shape)
        if number in config.routed_layers:
            score_BT = (x_BTD @ layer.router.score.weight[0]).detach()
            kept_BT = torch.zeros_like(alive_BT)
            for row, alive_T in enumerate(alive_BT):
                alive = alive_T.nonzero().flatten().tolist()
                scores = score_BT[row].tolist()
                members = [token for token in alive if scores[token] >= layer.router.cutoff]
                if mode == "topk":
                    members = top_slowly(scores, alive, num_routed(len(alive), routing.capacity))
                kept_BT[row, members] = True
            inside_BT = alive_BT = kept_BT
            gate_BT = torch.tensor([[GATES[routing.gate](r) for r in row] for row in score_BT.tolist()])
        y_BTD = layer.feed(attend_masked(layer, config, x_BTD, inside_BT), real_BT, mode)[0]
        weight_BT1 = torch.where(inside_BT, gate_BT, 0.0).unsqueeze(-1)
        x_BTD = x_BTD + weight_BT1 * (y_BTD - x_BTD)
    return model.lm_head(model.norm(x_BTD))
