"""Converted models under the trainers that people use, and under the harness that evaluates them."""

import json
from pathlib import Path

import pytest
import tokenizers
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Trainer, TrainingArguments, set_seed

from modepth import LossWeights, RoutingConfig
from modepth.hf import CapacitySchedule, RoutingCallback, convert, routing_mode, train_routers_only
from tests.tiny_models import tiny_model

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
STEPS = 6


def routed(**options: object) -> PreTrainedModel:
    torch.manual_seed(0)
    routing = RoutingConfig(capacity=0.5, predictor=8, losses=LossWeights(router=0.1), **options)
    return convert(tiny_model("llama"), routing, router_init="normal")


def rows(seed: int = 0, count: int = 32) -> list[dict[str, list[int]]]:
    tokens = torch.randint(3, 97, (count, 12), generator=torch.Generator().manual_seed(seed)).tolist()
    return [{"input_ids": row, "labels": row} for row in tokens]


SETTINGS = {
    "max_steps": STEPS,
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-2,
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
    "save_strategy": "no",
}


def arguments(folder: Path, **options: object) -> TrainingArguments:
    return TrainingArguments(output_dir=str(folder), **{**SETTINGS, **options})


def watch(model: PreTrainedModel) -> list[tuple[bool, str, float]]:
    """Whether each forward was of training, its mode and its capacity."""
    seen: list[tuple[bool, str, float]] = []
    model.register_forward_pre_hook(
        lambda module, args: seen.append(
            (module.training, module.routing_state.mode, module.routing_state.config.capacity)
        )
    )
    return seen


def test_the_trainer_trains_with_topk_and_evaluates_causally(tmp_path: Path) -> None:
    model, held_out = routed(), rows(1, 8)
    seen = watch(model)
    options = arguments(tmp_path, gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=3)
    trainer = Trainer(model, options, train_dataset=rows(), eval_dataset=held_out, callbacks=[RoutingCallback()])
    before = {name: weight.clone() for name, weight in model.named_parameters() if "mod_router" in name}
    cutoffs = [layer.mod_router.cutoff.item() for layer in (model.model.layers[1], model.model.layers[3])]
    trainer.train()
    assert {mode for training, mode, _ in seen if training} == {"topk"}
    assert {mode for training, mode, _ in seen if not training} == {"causal"}
    assert sum(training for training, *_ in seen) == 2 * STEPS
    for name, weight in model.named_parameters():
        if name in before:
            assert not torch.equal(weight, before[name]), name
    assert cutoffs != [layer.mod_router.cutoff.item() for layer in (model.model.layers[1], model.model.layers[3])]
    tokens = torch.tensor([row["input_ids"] for row in held_out])
    with torch.no_grad():
        expected = model.eval()(input_ids=tokens, labels=tokens).loss.item()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)


def test_a_resumed_run_ends_as_an_uninterrupted_one_its_capacity_schedule_included(tmp_path: Path) -> None:
    def finished(folder: Path, resume: bool) -> tuple[PreTrainedModel, list[float]]:
        set_seed(0)
        model = routed()
        seen = watch(model)
        callbacks = [RoutingCallback(), CapacitySchedule(0.5, share=0.99, stages=STEPS)]
        options = arguments(folder, save_strategy="steps", save_steps=3)
        trainer = Trainer(model, options, train_dataset=rows(), callbacks=callbacks)
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-3") if resume else None)
        return trainer.model, [capacity for _, _, capacity in seen]

    whole, capacities = finished(tmp_path, resume=False)
    state = json.loads((tmp_path / "checkpoint-3" / "trainer_state.json").read_text())
    kept = state["stateful_callbacks"]["CapacitySchedule"]["args"]
    assert kept == {"capacity": 0.5, "share": 0.99, "stages": STEPS}
    assert capacities == sorted(capacities, reverse=True)
    assert capacities[0] == 1.0
    resumed, later = finished(tmp_path, resume=True)
    assert later == capacities[3:]
    for (name, a), b in zip(whole.state_dict().items(), resumed.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_checkpointed_activations_train_alike(tmp_path: Path) -> None:
    ends = []
    for checkpointing in (False, True):
        set_seed(0)
        model = routed()
        options = arguments(tmp_path, gradient_checkpointing=checkpointing)
        Trainer(model, options, train_dataset=rows(), callbacks=[RoutingCallback()]).train()
        ends.append(model.state_dict())
    for name in ends[0]:
        assert torch.allclose(ends[0][name], ends[1][name], atol=1e-5), name


def test_only_routers_are_trained_when_asked(tmp_path: Path) -> None:
    model = routed()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert train_routers_only(model) == sum(w.numel() for n, w in model.named_parameters() if "mod_router" in n)
    Trainer(model, arguments(tmp_path), train_dataset=rows(), callbacks=[RoutingCallback()]).train()
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed
    assert all("mod_router" in name for name in changed)
    with pytest.raises(ValueError, match="no routed layers"):
        train_routers_only(tiny_model("llama"))


def test_lora_trains_saves_reloads_and_merges(tmp_path: Path) -> None:
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["mod_router"], task_type="CAUSAL_LM")
    model = get_peft_model(routed(), lora)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    Trainer(model, arguments(tmp_path / "run"), train_dataset=rows(), callbacks=[RoutingCallback()]).train()
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert any("mod_router.modules_to_save" in name for name in changed)
    assert all("lora" in name or "modules_to_save" in name or "cutoff" in name for name in changed)
    model.save_pretrained(tmp_path / "adapter")
    tokens = torch.tensor([row["input_ids"] for row in rows(2, 4)])
    with torch.no_grad():
        expected = model.eval()(input_ids=tokens).logits
        reloaded = PeftModel.from_pretrained(routed(), str(tmp_path / "adapter")).eval()
        assert torch.equal(reloaded(input_ids=tokens).logits, expected)
        merged = reloaded.merge_and_unload()
        assert torch.allclose(merged(input_ids=tokens).logits, expected, atol=1e-4)
    assert type(merged).__name__ == "ModLlamaForCausalLM"
    greedy = {"attention_mask": torch.ones_like(tokens), "max_new_tokens": 6, "do_sample": False}
    assert torch.equal(
        merged.generate(tokens, use_cache=True, **greedy), merged.generate(tokens, use_cache=False, **greedy)
    )


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word, w0 to w93."""
    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{number}": number + 3 for number in range(94)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="w0")


def test_the_trainer_of_trl_fine_tunes_a_converted_model(tmp_path: Path) -> None:
    from datasets import Dataset  # noqa: PLC0415
    from trl import SFTConfig, SFTTrainer  # noqa: PLC0415

    texts = [" ".join(f"w{token - 3}" for token in row["input_ids"]) for row in rows()]
    settings = {**SETTINGS, "max_length": 16, "gradient_accumulation_steps": 2, "bf16": False}
    options = SFTConfig(output_dir=str(tmp_path), **settings)
    model = routed()
    seen = watch(model)
    before = model.model.layers[1].mod_router.score.weight.clone()
    trainer = SFTTrainer(
        model,
        args=options,
        train_dataset=Dataset.from_dict({"text": texts}),
        processing_class=tiny_tokenizer(),
        callbacks=[RoutingCallback()],
    )
    trainer.train()
    assert {mode for training, mode, _ in seen if training} == {"topk"}
    assert not torch.equal(model.model.layers[1].mod_router.score.weight, before)


def test_the_evaluation_harness_takes_a_converted_model(tmp_path: Path) -> None:
    from lm_eval import simple_evaluate  # noqa: PLC0415
    from lm_eval.models.huggingface import HFLM  # noqa: PLC0415
    from lm_eval.tasks import TaskManager  # noqa: PLC0415

    questions = [{"text": f"w1 w{number}", "choices": ["w3 w4", "w5"], "label": number % 2} for number in range(4)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(each) + "\n" for each in questions))
    (tmp_path / "task.yaml").write_text(
        "task: tiny_choice\n"
        "dataset_path: json\n"
        f"dataset_kwargs:\n  data_files:\n    validation: {tmp_path / 'data.jsonl'}\n"
        "validation_split: validation\n"
        "output_type: multiple_choice\n"
        'doc_to_text: "{{text}}"\n'
        "doc_to_choice: choices\n"
        "doc_to_target: label\n"
        "metric_list:\n  - metric: acc\n"
    )
    model = routed()
    with routing_mode(model, "causal"):
        harness = HFLM(pretrained=model, tokenizer=tiny_tokenizer(), batch_size=2, device="cpu")
        manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
        found = simple_evaluate(harness, tasks=["tiny_choice"], task_manager=manager, bootstrap_iters=0)
    accuracy = found["results"]["tiny_choice"]["acc,none"]
    right = 0
    for each in questions:
        losses = []
        for choice in each["choices"]:
            ids = torch.tensor([tiny_tokenizer()(f"{each['text']} {choice}")["input_ids"]])
            with torch.no_grad():
                scores = model.eval()(input_ids=ids).logits.log_softmax(-1)
            new = range(2, ids.shape[1])
            losses.append(sum(scores[0, place - 1, ids[0, place]].item() for place in new))
        right += losses.index(max(losses)) == each["label"]
    assert accuracy == right / len(questions)
