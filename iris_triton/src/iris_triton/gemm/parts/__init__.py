"""Parts of fused operations: tiles of a product, sizes, rows that copy engines bring, slots that are added up."""
