"""One model on several processes: tensor parallel ranks and pipelines of stages."""
