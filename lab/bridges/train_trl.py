r"""Train a model through TRL with SHEAR; without `--model` the embedded task's.

    torchrun --nproc_per_node 2 -m lab.bridges.train_trl --config lab/bridges/toy.yaml
    accelerate launch --config_file zero3.yaml -m lab.bridges.train_trl \
        --model Qwen/Qwen2.5-Math-7B --use_vllm true

Every field of TRL's GRPOConfig is a flag; docs/scaling.md has the whole second command. Problems
come from the hub or from `--data`, as in train.py. Left out: the code task, whose reward function
is `code_reward`, and evaluation.
"""

from dataclasses import dataclass

from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, TrlParser

from lab.bridges.trl_rewards import math_reward, without_bos
from lab.bridges.trl_shear import ShearGRPOTrainer
from rewards import grade_math
from tasks import toy
from tasks.problems import load_problems
from tasks.task import choose_template, text_task


@dataclass
class Options:
    """The flags that are not GRPOConfig's."""

    model: str | None = None
    data: str | None = None
    window: int = 100
    stride: int = 25
    eps: float = 0.05
    threshold: float = 0.5
    mean1: bool = False


def main() -> None:
    """Read the flags, train, and save the model."""
    kinds: list = [Options, GRPOConfig]
    parser = TrlParser(kinds)
    parser.set_defaults(output_dir="runs/trl", report_to="none")
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
        eps=options.eps,
        threshold=options.threshold,
        mean1=options.mean1,
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
