"""The option ``experts="4bit"``: load, run, train and save mixtures of experts whose weights are packed in 4 bits."""
