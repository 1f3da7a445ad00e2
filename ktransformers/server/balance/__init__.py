"""The processes of `balance_serve`: which ones run, what they send to each other, and what happens when one dies.

    API process                     scheduler process                engine process (one per epoch)
    HTTP, text, supervisor          ids, pages, the truth            weights, K/V tensors
        │── Command ─────────────────────>│── StepPlan ────────────────────>│
        │<───────────────────── News ─────│<───────────────── StepResult ───│
        │<──────────────────────────────────────────────── EngineStatus ────│

The API process starts both others and holds the writing end of a pipe to each: whoever reads its end knows that the
API process is gone. An engine that dies or hangs is replaced by one of the next epoch, and the scheduler computes again
what was lost; without the scheduler or the API process everything stops.
"""
