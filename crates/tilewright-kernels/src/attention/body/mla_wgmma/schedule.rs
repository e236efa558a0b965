//! The order of products, weights and releases of both consumers.

use super::{config::KEYS, consumer::MlaConsumer};
use crate::attention::kernel::cta::CurrentItem;
use tilewright_ptx::build::{Value, Var};

/// Numbers of the consumers, and of their halves of the values.
const LEADER: usize = 0;
const FOLLOWER: usize = 1;

impl<'k> MlaConsumer<'_, 'k> {
    /// Computes the rows of an item.
    pub(super) fn attend(&self, current: &CurrentItem<'k>) {
        let k = self.k;
        let (first, end) = self.shared.tiles(current.load().kv_begin, current.kv_end);
        let tile = k.var("tile", first);
        k.loop_(|| {
            k.break_if(tile.get().ge(end));
            let pairs_end = self.pairs_end(tile.get(), end);
            let of_pairs = tile.get().lt(pairs_end);
            k.when_else(
                self.number.eq(LEADER as u32),
                || {
                    let pairs = || self.lead_pairs(current, tile, pairs_end);
                    k.when_else(of_pairs, pairs, || self.lead_tile(current, tile.get()));
                },
                || {
                    let pairs = || self.follow_pairs(current, tile, pairs_end);
                    k.when_else(of_pairs, pairs, || self.follow_tile(current, tile.get()));
                },
            );
            k.when(!of_pairs, || {
                tile.set(tile.get() + 1);
                self.count.set(self.count.get() + 1);
            });
        });
    }

    /// The end of the pairs of tiles from `tile` on that all rows see in full; `tile` if there are none.
    fn pairs_end(&self, tile: Value<'k, u32>, end: Value<'k, u32>) -> Value<'k, u32> {
        let [from, to] = self.unmasked().map(|at| at.max(0).reinterpret::<u32>());
        let pairs = ((to / KEYS as u32).min(end).max(tile) - tile) & !1;
        (tile + pairs).unless((tile * KEYS as u32).lt(from), tile)
    }

    /// Moves to the next pair.
    fn next_pair(&self, tile: Var<'k, u32>) {
        tile.set(tile.get() + 2);
        self.count.set(self.count.get() + 2);
    }

    /// The leader's part of pairs of tiles that need no mask.
    fn lead_pairs(&self, current: &CurrentItem<'k>, tile: Var<'k, u32>, end: Value<'k, u32>) {
        let k = self.k;
        self.multiply_keys(self.count.get());
        k.wgmma_wait(0);
        k.loop_(|| {
            let n = self.count.get();
            let sums = self.compute_weights(current.scale);
            self.wait_until_read();
            self.publish(LEADER, sums.factors);
            self.rescale(sums.factors);
            self.multiply_values(n, LEADER, false);
            self.rescale_sums(sums.factors);
            self.add(&sums);
            // each half is released before any other wait: its next keys take longer to arrive than all products
            k.wgmma_wait(0);
            self.release(n, LEADER);
            let factors = self.receive(FOLLOWER);
            self.rescale(factors);
            self.multiply_values(n + 1, LEADER, true);
            self.next_pair(tile);
            k.wgmma_wait(0);
            self.release(n + 1, LEADER);
            let has_more = tile.get().lt(end);
            k.when(has_more, || {
                self.multiply_keys(self.count.get());
                k.wgmma_wait(0);
            });
            k.break_if(!has_more);
        });
    }

    /// The follower's part.
    ///
    /// With one CTA per item, loads take longer than products. Then the follower adds the values of the first tile before it waits
    /// for the keys of the second, so that the next tile but one is loaded earlier. Otherwise the softmax of the leader overlaps with
    /// the product of the follower's keys.
    fn follow_pairs(&self, current: &CurrentItem<'k>, tile: Var<'k, u32>, end: Value<'k, u32>) {
        let k = self.k;
        let is_bound_by_loads = self.shared.config.ctas_per_item() == 1;
        let multiply_keys = || {
            self.multiply_keys(self.count.get() + 1);
            k.wgmma_wait(0);
        };
        if !is_bound_by_loads {
            multiply_keys();
        }
        k.loop_(|| {
            let n = self.count.get();
            let factors = self.receive(LEADER);
            self.rescale(factors);
            self.multiply_values(n, FOLLOWER, true);
            let end_first = || {
                self.release(n, FOLLOWER);
                self.end_read();
            };
            if is_bound_by_loads {
                k.wgmma_wait(0);
                end_first();
                multiply_keys();
            }
            let sums = self.compute_weights(current.scale);
            self.publish(FOLLOWER, sums.factors);
            self.rescale_after_products(sums.factors);
            if !is_bound_by_loads {
                end_first();
            }
            self.multiply_values(n + 1, FOLLOWER, false);
            self.add(&sums);
            self.next_pair(tile);
            // the next logits are products with the keys in this stage
            k.wgmma_wait(0);
            self.release(n + 1, FOLLOWER);
            k.break_if(tile.get().ge(end));
            if !is_bound_by_loads {
                multiply_keys();
            }
        });
    }

    /// The leader's part of a single tile.
    fn lead_tile(&self, current: &CurrentItem<'k>, tile: Value<'k, u32>) {
        let (k, n) = (self.k, self.count.get());
        self.multiply_keys(n);
        k.wgmma_wait(0);
        // the follower has read the visible masks of the previous tile, too
        self.wait_until_read();
        self.mask(current, tile);
        let sums = self.compute_weights(current.scale);
        self.publish(LEADER, sums.factors);
        self.rescale(sums.factors);
        self.rescale_sums(sums.factors);
        self.add(&sums);
        self.multiply_masked_values(current, tile, LEADER, false);
    }

    /// The follower's part of a single tile.
    fn follow_tile(&self, current: &CurrentItem<'k>, tile: Value<'k, u32>) {
        let factors = self.receive(LEADER);
        self.rescale(factors);
        self.multiply_masked_values(current, tile, FOLLOWER, true);
        self.end_read();
    }

    /// Adds the values of a single tile and releases this consumer's half.
    fn multiply_masked_values(
        &self,
        current: &CurrentItem<'k>,
        tile: Value<'k, u32>,
        half: usize,
        of_other: bool,
    ) {
        let n = self.count.get();
        let nonfinite = self.clean_values(current, tile, n, half);
        self.multiply_values(n, half, of_other);
        self.k.wgmma_wait(0);
        self.add_back(nonfinite, half);
        self.release(n, half);
    }
}
