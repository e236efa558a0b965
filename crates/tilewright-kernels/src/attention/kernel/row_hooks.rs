//! Hooks of a variant in the tensor-core kernels: supported hooks, their per-row values, and their application to logits and
//! masks.
//!
//! ```text
//! start of a tile     values that depend on the row alone are computed once and stored in shared memory: `[slots][128]` f32
//! logits              s = logits(scale · q · k), in place, in registers
//! mask                bits of the visible masks (`visible_mask`)
//! end of a row        update and output, once, after all parts are merged (`epilogue_hooks`)
//! ```
//!
//! Per-row values are loaded at their point of use to reduce register pressure.

use super::{
    AccFragment, CurrentItem, KeyRange, MAX_ROWS, MmaCta, QueryHead, QueryRow, visible::key_position,
};
use crate::{
    attention::items::{KnownRequest, WorkItemRegs},
    variant::{BiasedLogits, DeclaredVariant, Hooks, KeyPositions, PartialHook, SoftCapped},
};
use tilewright::attention::variant::{Hook, Input};
use tilewright_ptx::{Shared, Value};

/// The supported hooks, each with the inputs that are not properties of the row.
const SUPPORTED: [(Hook, &[Input]); 4] = [
    (Hook::Logits, &[Input::Kv, Input::Logit]),
    (Hook::Mask, &[Input::Kv]),
    (Hook::Update, &[Input::Max, Input::Sum]),
    (Hook::Output, &[Input::Dim, Input::O]),
];
/// The stride of slots.
const ROWS: usize = MAX_ROWS;
/// Keys whose masks are computed together, to have several table loads in flight.
const MASK_BATCH: u32 = 4;
pub(crate) fn late_inputs(hook: Hook) -> &'static [Input] {
    SUPPORTED.iter().find(|(supported, _)| *supported == hook).map_or(&[], |(_, late)| late)
}

/// Hooks and nodes of the stored per-row values.
pub(crate) fn slots(hooks: &Hooks<'_>) -> Vec<(Hook, u32)> {
    let live = SUPPORTED.into_iter().filter(|(hook, _)| hooks.is_live(*hook));
    live.flat_map(|(hook, late)| hooks.hoisted_nodes(hook, late).into_iter().map(move |node| (hook, node)))
        .collect()
}

/// Bytes of shared memory for the stored per-row values.
pub(crate) fn shared_bytes(hooks: &Hooks<'_>) -> usize {
    slots(hooks).len() * ROWS * 4
}

/// The hooks of the kernel, if there are any.
pub(crate) struct RowHooks<'k, 'v> {
    cta: MmaCta<'k>,
    declared: Option<DeclaredVariant<'k, 'v>>,
    slots: Vec<(Hook, u32)>,
    /// `[slots][128]`
    table: Option<Shared<'k, f32>>,
    /// Whether keys may be in blocks.
    blocks: bool,
}

impl<'k, 'v> RowHooks<'k, 'v> {
    /// Declares the variant's parameters after those of attention. Without `blocks` the kernel does not read block-sparse tensors.
    pub(crate) fn new(cta: &MmaCta<'k>, hooks: Option<&Hooks<'v>>, blocks: bool) -> Self {
        let k = cta.k;
        let live = hooks.filter(|hooks| SUPPORTED.iter().any(|(hook, _)| hooks.is_live(*hook)));
        let Some(hooks) = live else {
            return Self { cta: *cta, declared: None, slots: Vec::new(), table: None, blocks };
        };
        let heads = (cta.params.qo_heads, cta.params.group.quotient(cta.params.qo_heads));
        let slots = slots(hooks);
        let table = (!slots.is_empty()).then(|| k.shared("hooks_of_rows", slots.len() * ROWS, 16));
        Self { cta: *cta, declared: Some(hooks.declare(k, heads)), slots, table, blocks }
    }

    pub(crate) fn is_live(&self, hook: Hook) -> bool {
        self.declared.as_ref().is_some_and(|declared| declared.hooks().is_live(hook))
    }

    /// Whether rows have stored values.
    pub(crate) fn has_row_values(&self) -> bool {
        self.table.is_some()
    }

    fn reads(&self, hooks: &[Hook], input: Input) -> bool {
        let reads = |declared: &DeclaredVariant<'k, 'v>| {
            hooks.iter().any(|hook| declared.hooks().is_live(*hook) && declared.hooks().reads(*hook, input))
        };
        self.declared.as_ref().is_some_and(reads)
    }

    /// The query row of a head for some hooks.
    #[track_caller]
    pub(crate) fn query_row(
        &self,
        head: QueryHead<'k>,
        known: KnownRequest<'k>,
        hooks: &[Hook],
    ) -> QueryRow<'k> {
        // skip the lookup if no hook uses the result
        let look_up = self.reads(hooks, Input::Request) || self.reads(hooks, Input::Qo);
        QueryRow::new(&self.cta.params, head, known, look_up)
    }

    /// Stores the per-row values of the `count` rows from `begin` on, by all threads; valid after a barrier. Rows beyond the
    /// item's last repeat the last.
    pub(crate) fn fill(&self, current: &CurrentItem<'k>, begin: Value<'k, u32>, count: usize) {
        let (Some(declared), Some(table)) = (&self.declared, self.table) else { return };
        let (k, thread, item) = (self.cta.k, self.cta.k.thread(), current.load());
        k.when(thread.lt(count as u32), || {
            let head = self.cta.query_head(&item, (begin + thread).min(current.rows() - 1));
            let hooks = SUPPORTED.map(|(hook, _)| hook);
            let known = KnownRequest { request: item.request, offset: item.offset };
            let row = self.query_row(head, known, &hooks);
            for hook in hooks {
                let partial = declared.prepare(hook, &|input| row.input(input));
                let stored = |(slot, (_, node)): (usize, (Hook, u32))| {
                    partial.values(&[node]).into_iter().map(move |(_, value)| (slot, value))
                };
                self.slots_of(hook)
                    .flat_map(stored)
                    .for_each(|(slot, value)| table.plus(slot * ROWS).at(thread).store(value));
            }
        });
    }

    fn slots_of(&self, hook: Hook) -> impl Iterator<Item = (usize, (Hook, u32))> {
        self.slots.clone().into_iter().enumerate().filter(move |(_, (of, _))| *of == hook)
    }

    /// A live hook for the row of the tile that is `down` below `row`, with its stored values.
    #[track_caller]
    pub(crate) fn resume_row(
        &self,
        hook: Hook,
        row: Value<'k, u32>,
        down: usize,
    ) -> Option<PartialHook<'k, 'v>> {
        let declared = self.declared.as_ref().filter(|declared| declared.hooks().is_live(hook))?;
        let load = |(slot, (_, node)): (usize, (Hook, u32))| {
            self.table.map(|table| (node, table.at(row).plus(slot * ROWS + down).load()))
        };
        let stored: Vec<_> = self.slots_of(hook).filter_map(load).collect();
        Some(declared.resume(hook, &stored, late_inputs(hook)))
    }

    /// Applies the logits hook to `Q · Kᵀ`, in row tiles that are 64 rows apart, the first at row `row` of the tile.
    pub(crate) fn logits(
        &self,
        current: &CurrentItem<'k>,
        keys: KeyRange<'k>,
        row: &dyn Fn() -> Value<'k, u32>,
        products: &[Vec<AccFragment<'k>>],
    ) {
        let scales = vec![[current.product_scale; 2]; products.len()];
        let loaded = self.load_logits(current, keys, row, &scales);
        loaded.iter().for_each(|hook| hook.apply(products));
    }

    /// Loads the row values of the logits hook, if there is one, for row tiles as in [`Self::logits`], each with the factors of the
    /// products of both its rows.
    pub(crate) fn load_logits(
        &self,
        current: &CurrentItem<'k>,
        keys: KeyRange<'k>,
        row: &dyn Fn() -> Value<'k, u32>,
        scales: &[[Value<'k, f32>; 2]],
    ) -> Option<TileLogits<'k, 'v>> {
        if !self.is_live(Hook::Logits) {
            return None;
        }
        let positions = self.positions(current, keys);
        let row = row() + (self.cta.k.lane() >> 2);
        let of_tile = |tile| [0, 8].map(|down| self.resume_row(Hook::Logits, row, 64 * tile + down));
        let rows = (0..scales.len()).flat_map(of_tile).flatten().collect();
        Some(TileLogits { positions, rows, scales: scales.concat() })
    }

    /// A live hook for any row.
    #[track_caller]
    pub(crate) fn prepare_row(&self, hook: Hook, row: &QueryRow<'k>) -> Option<PartialHook<'k, 'v>> {
        let declared = self.declared.as_ref().filter(|declared| declared.hooks().is_live(hook))?;
        Some(declared.prepare(hook, &|input| row.input(input)))
    }

    /// Whether the mask hook may hide keys of any tile.
    pub(crate) fn masks_all_tiles(&self) -> bool {
        self.is_live(Hook::Mask) && self.mask_tail().is_none()
    }

    /// The number of last keys of a segment that the mask hook may hide, if it is limited to those.
    pub(crate) fn mask_tail(&self) -> Option<u32> {
        self.declared.as_ref().and_then(|declared| declared.hooks().mask_tail())
    }

    /// Whether the keys need a mask, given `masked` without hooks.
    #[track_caller]
    pub(crate) fn needs_mask(
        &self,
        item: impl Fn() -> WorkItemRegs<'k>,
        keys: KeyRange<'k>,
        masked: Value<'k, bool>,
    ) -> Value<'k, bool> {
        match self.mask_tail() {
            _ if self.masks_all_tiles() => self.cta.k.constant(true),
            Some(tail) => masked | (keys.first + keys.width.saturating_add(tail)).gt(item().kv_len),
            None => masked,
        }
    }

    /// Applies the mask hook to the visible mask `word` of row `row` of the tile.
    pub(crate) fn visible_mask(
        &self,
        item: &WorkItemRegs<'k>,
        row: Value<'k, u32>,
        keys: KeyRange<'k>,
        word: Value<'k, u64>,
    ) -> Value<'k, u64> {
        let Some(hook) = self.resume_row(Hook::Mask, row, 0) else { return word };
        let k = self.cta.k;
        // bits are shifted in at the top
        let visible = k.var::<u64>("visible", 0);
        k.repeat((0, keys.width), MASK_BATCH, |at| {
            let key = |ahead: u32| clamped_key_position(&self.cta, item, keys.first + at + ahead);
            let positions: Vec<_> = (0..MASK_BATCH).map(key).collect();
            let mut bits = k.constant(0_u32);
            for (ahead, kv_position) in positions.into_iter().enumerate() {
                let sees = hook.mask(&|input| (input == Input::Kv).then_some(kv_position));
                bits = bits | sees.select::<u32>(1 << ahead, 0);
            }
            let low = visible.get() >> MASK_BATCH;
            visible.set(low | (bits.to_u64() << (64 - MASK_BATCH)));
        });
        word & (visible.get() >> (64 - keys.width))
    }

    /// The positions of this lane's keys, two of each eight. Blocks have positions of their own, other keys follow each other.
    fn positions(&self, current: &CurrentItem<'k>, keys: KeyRange<'k>) -> KeyPositions<'k> {
        if !self.reads(&[Hook::Logits], Input::Kv) {
            return KeyPositions::Each(Vec::new());
        }
        let (item, lane) = (current.load(), self.cta.k.lane());
        let column = (lane & 3) << 1;
        let offsets = (0..keys.width).step_by(8).flat_map(|tile| [tile, tile + 1]);
        if !self.blocks {
            // exact below 2^24
            let first = (item.base + keys.first + column).reinterpret::<i32>().to_f32();
            return KeyPositions::Offsets { first, offsets: offsets.map(|at| at as f32).collect() };
        }
        let of_lane = |ahead: u32| clamped_key_position(&current.cta, &item, keys.first + lane + ahead);
        let words: Vec<_> = (0..keys.width).step_by(32).map(of_lane).collect();
        KeyPositions::Each(offsets.map(|key| words[key as usize / 32].of_lane(column + key % 32)).collect())
    }
}

/// The logits hook of a KV tile with its row values.
pub(crate) struct TileLogits<'k, 'v> {
    positions: KeyPositions<'k>,
    /// Two per row tile.
    rows: Vec<PartialHook<'k, 'v>>,
    /// Factors of the rows' products.
    scales: Vec<Value<'k, f32>>,
}

impl<'k> TileLogits<'k, '_> {
    /// The hook of both rows of one row tile, if it is a soft cap.
    pub(crate) fn soft_caps(&self) -> Option<[SoftCapped<'k>; 2]> {
        let [upper, lower] = &self.rows[..] else { return None };
        Some([upper.soft_cap(self.scales[0])?, lower.soft_cap(self.scales[1])?])
    }

    /// Whether [`Self::biases`] has values.
    pub(crate) fn has_biases(&self) -> bool {
        self.rows.len() == 2 && self.rows[0].is_biased(&self.positions)
    }

    /// The hook of both rows of one row tile, if it adds to logits what grows evenly from key to key.
    pub(crate) fn biases(&self) -> Option<[BiasedLogits<'k>; 2]> {
        let [upper, lower] = &self.rows[..] else { return None };
        let of_row = |row: usize, hook: &PartialHook<'k, '_>| hook.biased(&self.positions, self.scales[row]);
        Some([of_row(0, upper)?, of_row(1, lower)?])
    }

    /// Applies the hook to `Q · Kᵀ` of the row tiles. Hooks here store nothing, so missing keys do not matter.
    pub(crate) fn apply(&self, products: &[Vec<AccFragment<'k>>]) {
        let of_row = |sums: &[AccFragment<'k>], half: usize| -> Vec<_> {
            sums.iter().flat_map(|sums| [sums[2 * half], sums[2 * half + 1]]).collect()
        };
        let rows = products.iter().flat_map(|sums| [0, 1].map(|half| of_row(sums, half)));
        for ((hook, scale), row) in self.rows.iter().zip(&self.scales).zip(rows) {
            let products = row.iter().map(|product| product.get()).collect();
            let logits = hook.logits(&self.positions, products, *scale);
            row.iter().zip(logits).for_each(|(to, logit)| to.set(logit));
        }
    }
}

/// The position of a key, clamped to the item's last key.
#[track_caller]
fn clamped_key_position<'k>(
    cta: &MmaCta<'k>,
    item: &WorkItemRegs<'k>,
    key: Value<'k, u32>,
) -> Value<'k, f32> {
    key_position(cta, item, key.min(item.kv_end - 1)).to_f32()
}
