from cache_policy.prefetch import PrefetchGate


def test_a_rank_is_shut_out_while_it_is_wrong_and_comes_back():
    gate = PrefetchGate(threshold=0.5)
    assert gate.admitted(3, [10, 11, 12]) == [10, 11, 12]  # nothing is known: try
    for _ in range(20):
        gate.judge(3, [10, 11, 12], {10, 12, 40})
    assert gate.admitted(3, [20, 21, 22]) == [20, 22]
    assert gate.admitted(4, [20, 21, 22]) == [20, 21, 22]  # another layer's ranks are its own
    for _ in range(20):
        gate.judge(3, [10, 11, 12], {11})
    assert gate.admitted(3, [20, 21, 22]) == [21]


def test_precision_counts_every_judgement():
    gate = PrefetchGate()
    gate.judge(1, [5, 6], {5})
    gate.judge(1, [5, 6], {5, 6})
    gate.judge(1, [7], {5})
    assert gate.precision() == {1: [2 / 3, 1 / 2]}


def test_the_running_mean_is_the_definition():
    gate = PrefetchGate(threshold=0.6 * 0.95**3)
    for _ in range(3):
        gate.judge(0, [1], set())
    assert gate.admitted(0, [1]) == [1]  # 0.6 · 0.95³, exactly at the threshold
    gate.judge(0, [1], set())
    assert gate.admitted(0, [1]) == []
