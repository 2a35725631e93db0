"""A trainer beside the agent: GRPO on what was recorded, weights given to the running engine.

python examples/closed_loop/learn.py STORE MODEL_FOLDER ENGINE_URL STEPS BATCH SEED [resume]
"""

import sys

import torch

import lightning_otel as lo
from lightning_otel.algorithms.engines import VLLM
from lightning_otel.algorithms.grpo import GRPO
from lightning_otel.trainer import Trainer

LORA = {
    "r": 8,
    "lora_alpha": 16,
    "target_modules": ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"],
}


def main() -> None:
    store, model, engine, steps, batch, seed = sys.argv[1:7]
    torch.set_num_threads(1)
    algorithm = GRPO(
        model,
        peft_config=LORA,
        learning_rate=5e-3,
        per_device_train_batch_size=int(batch),
        announce=VLLM(engine, endpoint="llm"),
        follow="llm",
        max_staleness=4,
        seed=int(seed),
    )
    trainer = Trainer(
        algorithm=algorithm,
        store=lo.Store(store),
        min_batch_size=int(batch),
        max_iterations=int(steps),
    )
    if sys.argv[7:] == ["resume"]:
        trainer.resume_from_checkpoint("@last")
    trainer.fit_async().wait()


if __name__ == "__main__":
    main()
