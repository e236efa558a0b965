//! Errors of `Batch::with_shard`.

use super::plan::plan_refuses;
use tilewright::{
    Batch, PageTable,
    attention::{Level, Shard},
};

/// Requests with 4 and 5 keys in this shard.
fn batch() -> Batch<'static> {
    Batch::ragged(&[0, 1, 3], &[0, 4, 9])
}

#[track_caller]
fn shard_refused(kv_offsets: &[i64], kv_lens: &[i64], text: &str) {
    plan_refuses(&batch().with_shard(Shard { kv_offsets: kv_offsets.into(), kv_lens: kv_lens.into() }), text);
}

#[test]
fn shards_of_other_requests() {
    shard_refused(&[0], &[9, 9], "kv_offsets has 1 entries, expected num_requests = 2");
    shard_refused(&[0, 0, 0], &[9, 9], "kv_offsets has 3 entries, expected num_requests = 2");
    shard_refused(&[0, 0], &[9], "kv_lens has 1 entries, expected num_requests = 2");
}

#[test]
fn shards_outside_their_requests() {
    const MAX: i64 = i64::MAX;
    let refuses = shard_refused;
    refuses(&[-1, 0], &[9, 9], "request 0: kv_offset = -1 and 4 keys here do not lie in 0..9");
    refuses(&[0, 5], &[9, 9], "request 1: kv_offset = 5 and 5 keys here do not lie in 0..9");
    refuses(&[0, 0], &[9, 4], "request 1: kv_offset = 0 and 5 keys here do not lie in 0..4");
    refuses(&[0, 0], &[9, -3], "request 1: kv_offset = 0 and 5 keys here do not lie in 0..-3");
    let most =
        "request 0: kv_offset = 9223372036854775807 and 4 keys here do not lie in 0..9223372036854775807";
    refuses(&[MAX, 0], &[MAX, 9], most);
    let least = "request 0: kv_offset = -9223372036854775808 and 4 keys here do not lie in 0..9";
    refuses(&[i64::MIN, 0], &[9, 9], least);
    let long = "3 query rows and a longest request of 9223372036854775807 tokens, the most is 2147483647";
    refuses(&[0, MAX - 5], &[4, MAX], long);
}

#[test]
fn shards_take_no_levels() {
    let indptr = [0, 1, 2];
    let paged = Batch::paged(&indptr, PageTable::new(&indptr, &[0, 1], &[4, 4], 4));
    let shard = Shard { kv_offsets: (&[0, 0]).into(), kv_lens: (&[4, 4]).into() };
    let level = Level { qo_indptr: (&[0, 2]).into(), table: PageTable::new(&[0, 1], &[7], &[4], 4) };
    let text = "a batch with a shard takes no levels";
    plan_refuses(&paged.with_shard(shard).with_levels(&[level]), text);
    plan_refuses(&paged.with_shard(shard).with_shared_prefixes(), text);
}
