"""What surrounds the grouped products of a mixture of experts: tokens to the rows of their experts, and back."""
