"""The Trainer of transformers' quick tour: a model, arguments, a tokenized data set, a collator; then `train()`."""

from __future__ import annotations

import os
from typing import Any

from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)


model = AutoModelForCausalLM.from_pretrained(os.environ["FOREIGN_MODEL"])
tokenizer = AutoTokenizer.from_pretrained(os.environ["FOREIGN_MODEL"])
dataset = load_dataset(os.environ["FOREIGN_DATA"])


def tokenize_dataset(rows: dict[str, Any]) -> Any:
    return tokenizer(rows["text"])


dataset = dataset.map(tokenize_dataset, batched=True, remove_columns=["text"])
data_collator = DataCollatorForLanguageModeling(tokenizer=tokenizer, mlm=False)
training_args = TrainingArguments(
    output_dir=os.environ["FOREIGN_OUTPUT"],
    learning_rate=1e-3,
    adam_epsilon=1e-5,
    per_device_train_batch_size=4 // int(os.environ["FOREIGN_COPIES"]),
    per_device_eval_batch_size=4 // int(os.environ["FOREIGN_COPIES"]),
    num_train_epochs=1,
    logging_steps=1,
    eval_strategy="epoch",
    save_strategy="no",
    report_to="none",
    use_cpu=True,
    disable_tqdm=True,
)
trainer = Trainer(
    model=model,
    args=training_args,
    train_dataset=dataset["train"],
    eval_dataset=dataset["test"],
    processing_class=tokenizer,
    data_collator=data_collator,
)
trainer.train()
