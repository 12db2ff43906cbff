from cache_policy.eviction.lru import Lru
from cache_policy.eviction.policy import retention_order


def test_retention_order_is_last_token_first_then_best_rank():
    assert retention_order([[1, 2, 3], [4, 2, 5]]) == [4, 2, 5, 1, 3]
    assert retention_order([]) == []


def test_order_ranks_the_last_request_first():
    lru = Lru()
    lru.record(0, [[1, 2]])
    lru.record(0, [[3, 4], [5, 1]])
    assert list(lru.order(0, {1, 2, 3, 4, 5})) == [5, 1, 3, 4, 2]
    assert list(lru.order(0, {2, 4})) == [4, 2]


def test_groups_are_kept_apart():
    lru = Lru()
    lru.record(0, [[1]])
    lru.record(7, [[2]])
    assert list(lru.order(7, {1, 2})) == [2]
    assert list(lru.order(3, set())) == []


def test_forget_drops_recency():
    lru = Lru()
    lru.record(0, [[1, 2]])
    lru.forget(0, 1)
    assert list(lru.order(0, {1, 2})) == [2]
