"""GEM's environments, as `runner.py` calls them."""

import gem


class Episode:
    """One episode of `gem.make(task["env"])`; the action is what the agent says."""

    def __init__(self, ask):
        self._env = None

    def reset(self, task, seed):
        self._env = gem.make(task["env"], **task["kwargs"])
        text, info = self._env.reset(seed=seed)
        return {"messages": [_shown(text, info)]}

    def step(self, text, calls):
        said, reward, terminated, truncated, info = self._env.step(text)
        done = bool(terminated or truncated)
        return {"messages": [_shown(said, {} if done else info)], "reward": float(reward), "done": done}


def _shown(text, info):
    """What GEM's own loop shows: the observation, and how the game wants to be answered."""
    return "\n".join(filter(None, (str(text), info.get("prefix"), info.get("suffix"))))
