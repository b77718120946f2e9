from experts_in_pytorch import experts_in_pytorch  # noqa: F401
