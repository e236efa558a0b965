//! Loads of KV tiles by the producer: boxes by TMA, or rows by `cp.async`.

use super::{MlaWgmmaCta, config::KEYS, producer::MlaProducer, widen::copy_bytes};
use crate::attention::{
    body::wgmma::rows::{SourceRow, copy_rows},
    items::{NONE, WorkItemRegs},
    kernel::page_lookup::box_location,
    params::KvLayout,
};
use std::ops::Range;
use tilewright_ptx::{build::Value, isa::sync::Fence};

/// Page and slot of a key, as in the tensors.
type Location<'k> = (Value<'k, u32>, Value<'k, u32>);

impl<'k> MlaProducer<'_, 'k> {
    /// Loads the page of this lane's part of a KV tile.
    pub(super) fn load_page(&self, item: &WorkItemRegs<'k>, tile: Value<'k, u32>) {
        let (k, params) = (self.k, &self.shared.cta.params);
        let is_paged = params.layout.ne(KvLayout::Ragged.code());
        let key = self.key(tile);
        // boxes of a ragged tensor end with it, and copied rows with the item
        let ragged =
            if self.shared.config.widens() { key.lt(item.kv_end).select(0, NONE) } else { k.constant(0) };
        self.page.set(is_paged.select(k.constant(NONE), ragged));
        k.when(is_paged & self.has_part() & key.lt(item.kv_end), || {
            self.page.set(params.plan.indices.at(item.kv_start + params.page_size.quotient(key)).load());
        });
    }

    /// Loads a KV tile into the next stage, one half after the other. Parts of page [`NONE`] are zero-filled.
    pub(super) fn load(&self, item: &WorkItemRegs<'k>, tile: Value<'k, u32>) {
        let (k, n) = (self.k, self.count.get());
        let at = self.location(item, tile);
        // consumers may wait for the last tile before they release this stage
        self.hand_over();
        let copy = || {
            self.of_half(|half| self.copy_half(item, n, half, at));
            k.commit_copies();
            self.pending.set(true);
        };
        k.when_else(self.by_rows, copy, || {
            k.when(self.fills_stages, || (0..2).for_each(|half| self.load_half(item, n, half, at)));
        });
        self.count.set(n + 1);
    }

    /// Calls `body` with the half of each tile that this warp copies by rows.
    fn of_half(&self, body: impl Fn(usize)) {
        self.k.when_else(self.warp.lt(2), || body(0), || body(1));
    }

    /// Loads this lane's box of a half of tile `n`: all panels, or every second one to both CTAs of the item.
    fn load_half(&self, item: &WorkItemRegs<'k>, n: Value<'k, u32>, half: usize, at: Location<'k>) {
        let (k, shared) = (self.k, self.shared);
        self.wait_empty(n, half);
        let (tile, row_bytes) = (shared.stage(n).from_row(self.part_begin), 128 * KEYS);
        let (page, slot) = at;
        let (corner, ctas) = ([slot, item.kv_head, page], shared.cta.ctas_per_item);
        let barriers = shared.config.barrier_panels(half);
        // boxes of other warps may arrive before the bytes are expected
        k.when(self.thread.eq(0), || {
            let expect = |(at, panels): (usize, &Range<usize>)| {
                shared.full(n, half, at).arrive_expecting((panels.len() * row_bytes) as u32);
            };
            barriers.iter().enumerate().for_each(expect);
        });
        let load = |rank: usize| {
            for (at, panels) in barriers.iter().enumerate().skip(rank).step_by(ctas as usize) {
                let full = shared.full(n, half, at);
                for panel in panels.clone() {
                    let (map, column) = self.column(panel);
                    let to = tile.panels(panel..panel + 1).with_policy(self.policy).of_ctas(ctas);
                    to.load_columns(shared.maps[map], k.constant(column as u32), &corner, full);
                }
            }
        };
        k.when(self.has_part(), || match ctas {
            1 => load(0),
            _ => k.when_else(k.cluster_rank().eq(0), || load(0), || load(1)),
        });
    }

    /// The tensor map of a panel and its first column there.
    fn column(&self, panel: usize) -> (usize, usize) {
        let values = self.shared.config.value_panels();
        if panel < values { (0, 64 * panel) } else { (1, 64 * (panel - values)) }
    }

    /// Starts the copies of this warp's rows of a half of tile `n`, one row per lane.
    fn copy_half(&self, item: &WorkItemRegs<'k>, n: Value<'k, u32>, half: usize, at: Location<'k>) {
        let (k, shared) = (self.k, self.shared);
        let (params, config) = (&shared.cta.params, &shared.config);
        self.wait_empty(n, half);
        let (page, slot) = at;
        let exists = self.page.get().ne(NONE);
        let (page, slot) = (page.unless(!exists, 0).to_u64(), slot.unless(!exists, 0).to_u64());
        let to = shared.stage(n).from_row(self.part_begin.of_lane(0));
        let panels = config.half_panels(half);
        let values = panels.start..panels.end.min(config.value_panels());
        let size = config.kv.size();
        let copy = |address, panels: Range<usize>| {
            let row = SourceRow { address, exists, dim: 64 * panels.len() * size / 2 };
            let to = to.panels(panels);
            if config.widens() { copy_bytes(k, row, to) } else { copy_rows(k, row, to) }
        };
        let offset = params.k.offset(page, slot, item.kv_head) + (64 * values.start) as u64;
        copy(params.k.address + offset * size as u64, values.clone());
        if let Some(pe) = params.pe.filter(|_| panels.end > values.end) {
            let address = pe.k.address + pe.k.offset(page, slot, item.kv_head) * size as u64;
            copy(address, values.end..panels.end);
        }
    }

    /// Hands over the last tile of copied rows, if it is pending.
    pub(super) fn hand_over(&self) {
        let (k, shared) = (self.k, self.shared);
        k.when(self.pending.get(), || {
            let n = self.count.get() - 1;
            k.wait_copies(0);
            if shared.config.widens() {
                self.of_half(|half| self.widen_half(n, half));
            }
            // products read the tile, not only threads
            k.fence(Fence::ProxyAsyncShared);
            let arrive = |half: usize| {
                let barriers = 0..shared.config.barrier_panels(half).len();
                barriers.for_each(|at| shared.full(n, half, at).arrive());
            };
            self.of_half(arrive);
            self.pending.set(false);
        });
    }

    /// Waits until a half of the stage of tile `n` is released.
    fn wait_empty(&self, n: Value<'k, u32>, half: usize) {
        self.shared.empty(n, half).wait(MlaWgmmaCta::parity(n) ^ 1);
    }

    /// The location of this lane's part of a KV tile.
    fn location(&self, item: &WorkItemRegs<'k>, tile: Value<'k, u32>) -> Location<'k> {
        box_location(&self.shared.cta, item, self.key(tile), self.page.get())
    }

    /// The first key of this lane's part of a KV tile.
    fn key(&self, tile: Value<'k, u32>) -> Value<'k, u32> {
        tile * KEYS as u32 + self.part_begin
    }

    /// Whether this lane has a part of a tile.
    fn has_part(&self) -> Value<'k, bool> {
        self.part_begin.lt(KEYS as u32)
    }
}
