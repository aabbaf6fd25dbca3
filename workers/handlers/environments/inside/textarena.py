"""TextArena's games, as `runner.py` calls them; whoever else plays is the simulator, or a list of moves."""

import textarena as ta

RULES = (
    "You play a game against others. Read its rules, and answer with your move alone, in the form they ask."
)


class Episode:
    """One game, in which the agent is one of the players."""

    def __init__(self, ask):
        self._ask = ask
        self._done = False

    def reset(self, task, seed):
        self._task, self._me = task, task["player"]
        env = ta.make(task["env"], **task["kwargs"])
        if not task["wrapped"]:
            # The chat holds the history already, which those of observations would repeat with each turn.
            kinds = []
            while isinstance(env, ta.Wrapper):
                kinds.append(type(env))
                env = env.env
            for kind in reversed([kind for kind in kinds if issubclass(kind, ta.ActionWrapper)]):
                env = kind(env)
        self._env = env
        self._moves, self._said = {}, {}
        env.reset(num_players=task["players"], seed=seed)
        shown = self._others()
        if self._done:
            raise RuntimeError("the game is over before the agent had a turn")
        return {"messages": [shown]}

    def step(self, text, calls):
        self._done, _ = self._env.step(action=text)
        shown = self._others()
        if not self._done:
            return {"messages": [shown], "done": False}
        rewards, info = self._env.close()
        told = ((info or {}).get(self._me) or {}).get("reason")
        reward = (rewards or {}).get(self._me)
        return {"messages": [str(told)] if told else [], "reward": reward, "done": True}

    def score(self, messages):
        if self._done:
            return None
        # Whoever leaves a game against others has lost it.
        return {"reward": -1.0 if self._task["players"] > 1 else 0.0}

    def _others(self):
        """Have the others play until it is the agent's turn, or over; what the agent sees then."""
        while not self._done:
            player, seen = self._env.get_observation()
            shown = seen if isinstance(seen, str) else self._shown(player, seen)
            if player == self._me:
                return shown
            self._done, _ = self._env.step(action=self._move(player, shown))
        return ""

    def _shown(self, player, seen):
        names = self._env.state.role_mapping
        own = ta.ObservationType.PLAYER_ACTION
        lines = [
            f"[{names.get(sender, f'Player {sender}')}] {text}"
            for sender, text, kind in seen
            if not (sender == player and kind == own)
        ]
        return "\n".join(lines) or "It is your turn."

    def _move(self, player, shown):
        scripted = self._task["opponents"]
        if scripted:
            number = self._moves[player] = self._moves.get(player, -1) + 1
            return scripted[number % len(scripted)]
        said = self._said.setdefault(player, [{"role": "system", "content": RULES}])
        said.append({"role": "user", "content": shown})
        move = self._ask({"messages": said})
        said.append({"role": "assistant", "content": move})
        return move
