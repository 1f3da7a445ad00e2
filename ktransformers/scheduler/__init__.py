"""Who runs next: admit, chunk, batch, preempt, finish, abort. Plain Python on ids and counts; never imports torch."""
