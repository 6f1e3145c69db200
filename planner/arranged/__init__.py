"""Plans arranged for schedules that do not run one stage of whole micro-batches per rank."""
