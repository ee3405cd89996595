"""LoRA on a small GPT-2 with PEFT: the shards hold the adapters, and every worker keeps the frozen base.

ps-run --shards 2 --workers 2 --mode sync examples/huggingface/lora.py
"""

import argparse

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from ps_worker.huggingface import PsTrainer


def network() -> torch.nn.Module:
    """A GPT-2 of 210 thousand frozen parameters, the same on every worker, with adapters of rank 4."""
    torch.manual_seed(0)
    base = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=64, n_layer=4, n_head=4))
    return get_peft_model(base, LoraConfig(r=4, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True))


def dataset(count: int) -> list[dict[str, torch.Tensor]]:
    """Sequences that count on from a random number."""
    first = torch.randint(0, 64, (count, 1), generator=torch.Generator().manual_seed(0))
    tokens = (first + torch.arange(16)) % 64
    return [{"input_ids": ids, "labels": ids} for ids in tokens]


def main() -> None:
    """Train, then print what a step moves beside the sizes of the adapters and of the base."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--output", default="trained", help="folder of the adapters")
    args = parser.parse_args()
    arguments = TrainingArguments(
        output_dir=args.output,
        max_steps=args.steps,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        save_strategy="no",
        dataloader_pin_memory=torch.cuda.is_available(),
        report_to="none",
        disable_tqdm=True,
    )
    model = network()
    trainer = PsTrainer(model=model, args=arguments, train_dataset=dataset(256))
    trainer.train()
    sizes = {kept: sum(p.nbytes for p in model.parameters() if p.requires_grad is not kept) for kept in (True, False)}
    moved = trainer.optimizer.optimizer.last.transferred_bytes
    if trainer.is_world_process_zero():
        print(f"a step moves {moved} bytes: adapters {sizes[False]}, base {sizes[True]}")
        trainer.save_model()


if __name__ == "__main__":
    main()
