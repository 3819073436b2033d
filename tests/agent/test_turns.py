from reterm_jax.agent.turns import Turn, history, observation


def test_observation_shows_what_happened_and_no_more():
    assert observation(Turn("t", "ls", "a\nb\n", 0)) == "a\nb\n"
    assert observation(Turn("t", "true", "", 0)) == ""
    assert observation(Turn("t", "x", "no\n", 2)) == "no\n(exit code 2)"
    assert observation(Turn("t", "x", "", 1)) == "(exit code 1)"
    assert observation(Turn("t", "x", "part", 124, 3.2, timed_out=True)) == "part\n(stopped: time limit of 3 s)"
    assert observation(Turn("t", error="Error: no")) == "Error: no"
    assert observation(Turn("t", "submit")) == ""


def test_history_has_what_was_run():
    turns = [Turn("", "ls", "a", 0), Turn("", error="no"), Turn("", "x", "b", 1), Turn("", "submit")]
    assert history(turns) == [("ls", "a"), ("x", "b")]
