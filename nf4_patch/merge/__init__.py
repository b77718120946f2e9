"""The option ``merge="reversible"``: unmerging an adapter restores the packed bytes of a linear layer."""
