//! Pairs of CTAs that execute runs together: clusters of two.
//!
//! Differences from a CTA alone:
//!
//! | | |
//! |---|---|
//! | runs | CTA 0 draws them, and sends their numbers to CTA 1 |
//! | rows | each CTA takes a half of those of an item; one without rows stores nothing |
//! | KV tiles | each CTA copies every second box to both; a stage is empty when both have released it |
//! | unseen tiles | a CTA releases those that only the other one sees |
//! | repetition | flags of an item whose outputs are not finite are written in both CTAs, and both process it again |

use super::{
    ONE_CONSUMER, Q_ROWS, REPEAT, SlotBarriers, WgmmaCta, config::FLAG_SLOTS, consumer::Consumer,
    producer::Producer,
};
use crate::tile::release_from_warp;
use tilewright_ptx::{Shared, Value, Var};

/// This CTA's pair: a cluster of two.
#[derive(Clone, Copy)]
pub(super) struct CtaPair<'k> {
    /// 0 or 1.
    pub(super) rank: Value<'k, u32>,
    /// The rank of the other CTA.
    pub(super) other: Value<'k, u32>,
    /// Two slots of drawn runs: CTA 0 draws them, and sends their numbers to CTA 1.
    pub(super) drawn: SlotBarriers<'k>,
}

impl<'k> WgmmaCta<'k> {
    /// Releases an item by a warp, in both CTAs of a pair. `has_flag`: whether the warp has written a flag for both.
    #[track_caller]
    pub(super) fn release_item(&self, n: Value<'k, u32>, has_flag: Value<'k, bool>) {
        let (k, empty) = (self.k, self.items.empty(n));
        let Some(CtaPair { other, .. }) = self.pair else { return release_from_warp(k, empty) };
        k.sync_warp();
        // a barrier in the rare branch: the assembler would predicate its fence, which takes 0.2 us although it is not executed
        k.when(has_flag, || {
            k.when(k.lane().eq(0), || empty.release_in_cta(other));
            k.sync_warp();
        });
        k.when(k.lane().eq(0), || {
            empty.arrive();
            k.when(!has_flag, || empty.arrive_in_cta(other));
        });
    }

    /// The last of `rows` rows. A CTA of a pair may have none; its row 0 is then not stored.
    #[track_caller]
    pub(super) fn last_row(&self, rows: Value<'k, u32>) -> Value<'k, u32> {
        if self.pair.is_some() { rows.max(1) - 1 } else { rows - 1 }
    }

    /// The flags of this CTA's `n`-th item: [`REPEAT`]. Those of both CTAs of a pair have slots of their own.
    #[track_caller]
    pub(super) fn flags(&self, n: Value<'k, u32>) -> Shared<'k, u32> {
        let slot = n & (FLAG_SLOTS - 1);
        match self.config.pairs {
            true => self.cta.at::<u32>(self.arena.flags).at(slot * self.config.consumer_warps()),
            false => self.item_words(n).plus(REPEAT),
        }
    }
}

impl<'k> Producer<'_, 'k> {
    /// Sets flags to 0, after all lanes have read them.
    pub(super) fn clear(&self, flags: Shared<'k, u32>) {
        let (k, warps) = (self.k, self.shared.config.consumer_warps());
        k.sync_warp();
        k.when(k.lane().lt(warps), || flags.at(k.lane()).store(0));
    }

    /// Waits until all warps that execute runs together have released the item of a slot. Their flags are then visible.
    pub(super) fn wait_for_item_slot(&self, n: Value<'k, u32>) {
        match self.shared.pair {
            Some(_) => self.shared.items.wait_empty_in_cluster(n),
            None => self.shared.items.wait_empty(n),
        }
    }

    /// Takes this CTA's half of the rows of item `n`, of which each lane has a word. With a causal mask the first half sees fewer keys, so
    /// the CTAs take it in turns.
    pub(super) fn take_rows(&self, pair: CtaPair<'k>, n: Value<'k, u32>, word: Var<'k, u32>) {
        let (k, lane) = (self.k, self.k.lane());
        let tokens = self.shared.cta.params.group.quotient(k.constant(Q_ROWS as u32));
        let (rows, skipped) = (word.get().of_lane(1), ((pair.rank + n) & 1) * tokens);
        let left = rows.max(skipped) - skipped;
        let begin = word.get() + left.eq(0).select::<u32>(0, skipped);
        let other = lane.eq(1).select(left.min(tokens), word.get());
        word.set(lane.eq(0).select(begin, other));
    }

    /// Sends the number of the drawn run to the other CTA. The slot is free: the other CTA read its number of two runs ago before it
    /// released the item of that time.
    pub(super) fn send_drawn(&self, pair: CtaPair<'k>) {
        let (k, n) = (self.k, self.sent.get());
        k.when(k.lane().eq(0), || {
            self.drawn_slot(pair, n).of_cta(pair.other).store(self.drawn.get());
            pair.drawn.full(n).release_in_cta(pair.other);
        });
    }

    /// Receives the number of the drawn run from the other CTA.
    pub(super) fn receive_drawn(&self, pair: CtaPair<'k>) {
        let n = self.sent.get();
        pair.drawn.full(n).wait_in_cluster((n >> 1) & 1);
        self.drawn.set(self.drawn_slot(pair, n).load());
    }

    fn drawn_slot(&self, pair: CtaPair<'k>, n: Value<'k, u32>) -> Shared<'k, u32> {
        self.shared.cta.at::<u32>(self.shared.arena.drawn).at(pair.drawn.slot(n))
    }
}

impl<'k> Consumer<'_, 'k> {
    /// Releases the KV tiles that only the other CTA of a pair needs. Returns the end of the others.
    pub(super) fn skip_unseen(&self, first: Value<'k, u32>, end: Value<'k, u32>) -> Value<'k, u32> {
        let (k, Some(seen_end)) = (self.k, self.seen_end) else { return end };
        let seen_end = seen_end.get().max(first).min(end);
        k.repeat_rolled((seen_end, end), 1, |_| {
            let cursors = [self.keys, self.values];
            cursors.iter().for_each(|cursor| cursor.wait_full());
            // no warp may miss the phase of a stage that another one releases
            k.sync_named(self.number + ONE_CONSUMER, 128);
            cursors.into_iter().for_each(|cursor| self.release(cursor));
        });
        seen_end
    }
}
