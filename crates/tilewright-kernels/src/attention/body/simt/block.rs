//! State of a CTA, and its loops over items, blocks of rows and KV tiles.

use super::{KEYS, SMALL_ROWS_PER_WARP, SimtConfig, WARPS, key_table::KeyTable, row_table::SimtRowTable};
use crate::{
    attention::{
        AttentionParamRegs, KnownRequest, WorkItemRegs,
        kernel::query_row::{QueryHead, QueryRow},
    },
    variant::{DeclaredVariant, Hooks, PartialHook},
};
use tilewright::attention::variant::Hook;
use tilewright_ptx::{Builder, Shared, Value};

/// The hooks, with their constant parts computed.
pub(super) struct SimtHooks<'k, 'v> {
    declared: DeclaredVariant<'k, 'v>,
    pub(super) query: PartialHook<'k, 'v>,
    pub(super) key: PartialHook<'k, 'v>,
    pub(super) value: PartialHook<'k, 'v>,
    pub(super) logits: PartialHook<'k, 'v>,
    pub(super) mask: PartialHook<'k, 'v>,
    pub(super) update: PartialHook<'k, 'v>,
    pub(super) output: PartialHook<'k, 'v>,
}

impl<'k, 'v> SimtHooks<'k, 'v> {
    #[track_caller]
    fn new(declared: DeclaredVariant<'k, 'v>) -> Self {
        let [query, key, value, logits, mask, update, output] =
            Hook::ALL.map(|hook| declared.prepare(hook, &|_| None));
        Self { declared, query, key, value, logits, mask, update, output }
    }

    pub(super) fn hooks(&self) -> &Hooks<'v> {
        self.declared.hooks()
    }

    /// Whether hooks need elements `i` and `i + head_dim / 2` of queries and keys together.
    pub(super) fn needs_pairs(&self) -> bool {
        self.hooks().is_live(Hook::Query) || self.hooks().is_live(Hook::Key)
    }
}

/// State shared by all threads of a CTA.
pub(super) struct SimtCta<'k, 'v> {
    pub(super) k: &'k Builder,
    pub(super) config: SimtConfig,
    pub(super) params: AttentionParamRegs<'k>,
    pub(super) hooks: SimtHooks<'k, 'v>,
    pub(super) warp: Value<'k, u32>,
    pub(super) lane: Value<'k, u32>,
    /// Queries of the block, `[rows, head_dim_qk]` with row stride `q_stride`; dims beyond the last are 0.
    pub(super) q: Shared<'k, f32>,
    /// `Σ weight · v` of the block, `[rows, head_dim_vo]` with row stride `o_stride`; each lane accesses only dims of its own residue.
    pub(super) o: Shared<'k, f32>,
    /// Logits, then weights of the tile, `[rows, 64]`.
    pub(super) weights: Shared<'k, f32>,
    /// Some dims of the tile's keys, `[64, 32]` with row stride 36, then of its values, `[64, v_dims]`.
    pub(super) stage: Shared<'k, f32>,
    pub(super) rows: SimtRowTable<'k>,
    pub(super) keys: KeyTable<'k>,
    /// A word that one thread broadcasts to the others.
    pub(super) word: Shared<'k, u32>,
}

/// A block of packed rows of an item.
#[derive(Clone, Copy)]
pub(super) struct RowBlock<'k> {
    pub(super) item: WorkItemRegs<'k>,
    /// The first packed row.
    pub(super) first: Value<'k, u32>,
    /// Whether the block has at most [`SMALL_ROWS_PER_WARP`] rows per warp, for which the products are specialized.
    is_small: Value<'k, bool>,
    /// Rows per warp.
    pub(super) per_warp: Value<'k, u32>,
    /// The first row of this warp in the block.
    pub(super) warp_first: Value<'k, u32>,
    /// Number of this warp's rows.
    pub(super) count: Value<'k, u32>,
}

impl<'k, 'v> SimtCta<'k, 'v> {
    #[track_caller]
    pub(super) fn new(k: &'k Builder, config: SimtConfig, hooks: &Hooks<'v>) -> Self {
        let params = AttentionParamRegs::declare(k, config.kind());
        let heads = (params.qo_heads, params.group.quotient(params.qo_heads));
        let hooks = SimtHooks::new(hooks.declare(k, heads));
        let rows = config.rows();
        let array = |name: &str, len: u32| k.shared::<f32>(name, len as usize, 16);
        Self {
            k,
            config,
            params,
            hooks,
            warp: k.warp_index(),
            lane: k.lane(),
            q: array("q", rows * config.q_stride()),
            o: array("o", rows * config.o_stride()),
            weights: array("weights", rows * KEYS),
            stage: array("stage", config.stage()),
            rows: SimtRowTable::new(k, rows),
            keys: KeyTable::new(k),
            word: k.shared("word", 1, 4),
        }
    }

    /// Executes all items of this CTA.
    #[track_caller]
    pub(super) fn run(&self) {
        let (k, params) = (self.k, &self.params);
        let bounds = params.plan.worker_indptr.at(k.cta());
        k.repeat((bounds.load(), bounds.plus(1).load()), 1, |item| {
            let item = WorkItemRegs::load(k, params.plan.items, item);
            let packed = item.qo_len * params.group.by;
            k.repeat((0, packed), self.config.rows(), |first| self.attend(item, first, packed));
            self.arrive_and_merge(&item);
        });
    }

    /// Processes one block of an item's `packed` rows.
    #[track_caller]
    fn attend(&self, item: WorkItemRegs<'k>, first: Value<'k, u32>, packed: Value<'k, u32>) {
        let (k, most) = (self.k, self.config.rows() / WARPS);
        let left = (packed - first).min(self.config.rows());
        k.when(k.thread().lt(left), || {
            let known = KnownRequest { request: item.request, offset: item.offset };
            let head = QueryHead::of_row(&self.params, item.qo_begin, item.kv_head, first + k.thread());
            let row = QueryRow::new(&self.params, head, known, true);
            self.init_row(k.thread(), &row);
        });
        k.sync_threads();
        let is_small = match most {
            SMALL_ROWS_PER_WARP => k.constant(true),
            _ => left.le(SMALL_ROWS_PER_WARP * WARPS),
        };
        let per_warp = is_small.select(SMALL_ROWS_PER_WARP, most);
        let warp_first = self.warp * per_warp;
        let count = (left.max(warp_first) - warp_first).min(per_warp).named("row_count");
        self.attend_block(&RowBlock { item, first, is_small, per_warp, warp_first, count });
        // the next block overwrites the row and key tables
        k.sync_threads();
    }

    /// Attention of the block's rows to keys `kv_begin..kv_end` of the segment: `O [rows, head_dim_vo]` of `S [rows, 64]` per KV tile.
    #[track_caller]
    fn attend_block(&self, block: &RowBlock<'k>) {
        let (k, item) = (self.k, &block.item);
        self.load_queries(block);
        self.clear_output(block);
        // tiles begin at multiples of their keys, independent of the item's first key
        let begin = item.kv_begin & !(KEYS - 1);
        k.repeat((begin, item.kv_end), KEYS, |tile| {
            let all_visible = k.var("all_visible", true);
            self.look_up_keys(item, tile);
            k.sync_threads();
            self.multiply_keys(block);
            k.when(block.count.gt(0), || self.softmax_tile(block, tile, all_visible));
            self.multiply_values(block, all_visible.get());
        });
        self.finish_rows(block);
    }

    /// Calls `body` with the number of rows per warp. It is recorded once per number, so that sums of rows are in registers.
    #[track_caller]
    pub(super) fn specialize(&self, block: &RowBlock<'k>, body: impl Fn(usize)) {
        let most = (self.config.rows() / WARPS) as usize;
        self.k.when_else(block.is_small, || body(SMALL_ROWS_PER_WARP as usize), || body(most));
    }

    /// Runs `body` for each row of this warp in a block.
    #[track_caller]
    pub(super) fn for_each_row(&self, block: &RowBlock<'k>, body: impl FnOnce(Value<'k, u32>)) {
        self.k.repeat_rolled((block.warp_first, block.warp_first + block.count), 1, body);
    }
}
