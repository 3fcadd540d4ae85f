"""What fused operations are made of: tiles of a product, sizes, rows that are carried, slots that are added up."""
