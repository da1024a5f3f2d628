r"""Train a model through TRL with SHEAR; without `--model` the embedded task's, on a CPU.

    torchrun --nproc_per_node 2 -m integrations.train_trl
    accelerate launch --config_file zero3.yaml -m integrations.train_trl \
        --model Qwen/Qwen2.5-Math-7B --use_vllm true

Every field of TRL's GRPOConfig is a flag; docs/scaling.md has the whole second command. Problems
come from the hub or from `--data`, as in train.py. Left out: the code task, whose reward function
is `code_reward`, and evaluation.
"""

from dataclasses import dataclass

from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, TrlParser

from integrations.trl_rewards import math_reward, without_bos
from integrations.trl_shear import ShearGRPOTrainer
from rewards import grade_math
from tasks import toy
from tasks.problems import choose_template, load_problems, text_task

# train.py's recipe for the embedded task, with two processes: 16 prompts per generation and 4 per
# update, of 8 rollouts each.
TOY_DEFAULTS: dict[str, object] = dict(
    use_cpu=True,
    bf16=False,
    window=12,
    stride=6,
    max_completion_length=2 * toy.response_tokens(2),
    per_device_train_batch_size=16,
    steps_per_generation=4,
    gradient_accumulation_steps=1,
    learning_rate=1e-4,
    lr_scheduler_type="constant",
    max_steps=160,
    save_strategy="no",
)


@dataclass
class Options:
    """The flags that are not GRPOConfig's."""

    model: str | None = None
    data: str | None = None
    window: int = 100
    stride: int = 25


def main() -> None:
    """Read the flags, train, and save the model."""
    kinds: list = [Options, GRPOConfig]
    parser = TrlParser(kinds)
    parser.set_defaults(output_dir="runs/trl", report_to="none", num_generations=8)
    # `--model` decides the defaults; it may also stand in the file of `--config`
    given, _ = TrlParser(kinds[:1], add_help=False).parse_args_and_config(
        return_remaining_strings=True
    )
    if given.model is None:
        parser.set_defaults(**TOY_DEFAULTS)
    options, config = parser.parse_args_and_config()
    if options.model:
        model = options.model
        tokenizer = AutoTokenizer.from_pretrained(model)
        task = text_task("math", choose_template("auto", model, tokenizer), tokenizer, grade_math)
        problems, _ = load_problems("math", options.data)
        prompts = without_bos(tokenizer, map(task.prompt, problems))
    else:
        model = toy.make_model(2, seed=0)
        tokenizer = toy.make_tokenizer()
        toy.warm_up(model, 2, set(), steps=300, seed=0)
        problems, _ = toy.make_problems(2_000, 0, 2, seed=0)
        prompts = [problem["problem"] for problem in problems]
    dataset = Dataset.from_dict(
        {"prompt": prompts, "answer": [problem["answer"] for problem in problems]}
    )
    trainer = ShearGRPOTrainer(
        model,
        math_reward,
        config,
        dataset,
        processing_class=tokenizer,
        window=options.window,
        stride=options.stride,
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
