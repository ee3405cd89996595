"""A small BERT learns which of two tokens a sequence has more of, with the Trainer of transformers.

ps-run --shards 2 --workers 2 --mode sync examples/huggingface/trainer.py --epochs 3
"""

import argparse

import torch
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

from ps_worker.huggingface import PsTrainer as Trainer


def network() -> BertForSequenceClassification:
    """Two layers with random values: 11 thousand parameters."""
    config = BertConfig(
        vocab_size=12,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForSequenceClassification(config)


def dataset(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Sequences of 16 tokens, labelled by whether token 1 is more frequent than token 2."""
    tokens = torch.randint(0, 12, (count, 16), generator=torch.Generator().manual_seed(seed))
    labels = ((tokens == 1).sum(dim=1) > (tokens == 2).sum(dim=1)).long()
    return [{"input_ids": ids, "labels": label} for ids, label in zip(tokens, labels, strict=True)]


def accuracy(prediction: object) -> dict[str, float]:
    """The part of the evaluation set that is labelled rightly."""
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}  # type: ignore[attr-defined]


def main() -> None:
    """Read the flags, train, evaluate, and print what was reached."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16, help="sequences per process and step")
    parser.add_argument("--accumulate", type=int, default=1, help="batches of one step")
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--output", default="trained", help="folder of checkpoints")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in the folder")
    args = parser.parse_args()
    arguments = TrainingArguments(
        output_dir=args.output,
        num_train_epochs=args.epochs,
        per_device_train_batch_size=args.batch_size,
        gradient_accumulation_steps=args.accumulate,
        learning_rate=2e-3,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=4,
        train_sampling_strategy="sequential",
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        logging_steps=8,
        dataloader_pin_memory=torch.cuda.is_available(),
        report_to="none",
        disable_tqdm=True,
    )
    torch.manual_seed(arguments.seed)
    trainer = Trainer(
        model=network(),
        args=arguments,
        train_dataset=dataset(args.samples, seed=0),
        eval_dataset=dataset(128, seed=1),
        compute_metrics=accuracy,
    )
    trainer.train(resume_from_checkpoint=args.resume or None)
    if trainer.is_world_process_zero():
        print(f"best accuracy {trainer.state.best_metric:.3f} after {trainer.state.global_step} steps")


if __name__ == "__main__":
    main()
