//! Prefill on Hopper: FlashAttention with `wgmma` and TMA, head_dim 128, bf16, ragged requests.
//!
//! ```text
//! CTA      128 query rows of one head and request: a producer warpgroup, and two consumers of 64 rows each
//! producer for each KV tile of 128 keys, from the last to the first:  K, then V, into two rings of two stages
//! consumer S = Q · Kᵀ                      logits
//!          P = 2^((S - max) · scale)       online softmax in registers
//!          O = O · 2^((old max - max) · scale) + P · V
//! ```
//!
//! `S` of the next tile overlaps with the softmax of the current one: a consumer starts `Q · Kᵀ` of tile j, then `P · V` of tile
//! j + 1, waits for the first only, computes the softmax of tile j, and then waits for the second.
//!
//! Shapes: q, o `[tokens, qo_heads, 128]`; k, v `[keys, kv_heads, 128]`, in any strides that a tensor map supports; lse `[tokens,
//! qo_heads]` in base 2, -inf where a row sees no key; indptr `[requests + 1]`. Grid: `[tiles of the longest request, qo_heads,
//! requests]`.

use crate::{
    attention::kernel::{epilogue::normalizer, softmax::finite_max},
    tile::{Cursor, Ring, SharedTile, Sums, reduce, sums},
    variant::{Hooks, PartialHook},
};
use half::bf16;
use tilewright::attention::variant::{ExpressionVariant, Hook, Input};
use tilewright_ptx::{
    build::{Barrier, Builder, Global, Value, Var, WgmmaLeft, WgmmaOperands},
    ir::Kernel,
    isa::{
        matrix::{Elements, Major},
        sync::Fence,
    },
    verify::Invalid,
};

/// Elements per head.
const HEAD_DIM: usize = 128;
/// Query rows per CTA, 64 per consumer.
const Q_ROWS: usize = 128;
/// Keys per KV tile.
const KEYS: usize = 128;
/// Stages per ring.
const STAGES: usize = 2;
/// One producer and two consumers, 128 threads each.
const THREADS: u32 = 384;
const CONSUMERS: u32 = 2;
const BF16: (Elements, Elements) = (Elements::Bf16, Elements::Bf16);

/// Compile-time configuration of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrefillConfig {
    /// Query heads and KV heads.
    pub heads: (u32, u32),
    /// Whether row i of a request sees only keys up to `kv_len - qo_len + i`.
    pub causal: bool,
}

/// Builds the kernel. Parameters: tensor maps of q, k and v in boxes of `[1, 128, 64]`; o, lse; qo_indptr, kv_indptr; the scale
/// of logits, times log2 e if there is no hook; the variant's parameters.
///
/// # Errors
/// When the variant has other hooks than that of logits.
pub fn prefill(
    name: &str,
    config: PrefillConfig,
    variant: Option<&ExpressionVariant>,
) -> Result<Kernel, Invalid> {
    let hooks = variant.map(|variant| logits_hook(name, variant)).transpose()?.flatten();
    Builder::kernel(name, THREADS, |k| {
        let cta = PrefillCta::new(k, config, hooks);
        cta.init();
        k.when(cta.has_rows(), || {
            let group = (k.thread() >> 7).of_lane(0).named("warpgroup");
            k.when_else(group.eq(0), || cta.produce(), || PrefillConsumer::new(&cta, group - 1).run());
        });
    })
}

/// The logits hook of `variant`; `None` if it does nothing.
fn logits_hook<'v>(name: &str, variant: &'v ExpressionVariant) -> Result<Option<Hooks<'v>>, Invalid> {
    let hooks = Hooks::of(name, variant)?;
    let others = Hook::ALL.into_iter().filter(|hook| *hook != Hook::Logits && hooks.is_live(*hook));
    let mut reasons: Vec<String> = others.map(|hook| format!("it has the hook {}", hook.name())).collect();
    if !hooks.softmax() {
        reasons.push("it has no softmax".to_owned());
    }
    if hooks.stores() {
        reasons.push("it writes to buffers".to_owned());
    }
    if reasons.is_empty() {
        return Ok(hooks.is_live(Hook::Logits).then_some(hooks));
    }
    Err(Invalid::of(name, format!("cannot compute this variant: {}", reasons.join("; "))))
}

/// State shared by all warps of a CTA.
struct PrefillCta<'k, 'v> {
    k: &'k Builder,
    config: PrefillConfig,
    hook: Option<PartialHook<'k, 'v>>,
    maps: [Value<'k, u64>; 3],
    o: Global<'k, bf16>,
    lse: Global<'k, f32>,
    scale: Value<'k, f32>,
    /// The first row of this CTA in its request.
    first_row: Value<'k, u32>,
    head: Value<'k, u32>,
    qo: RaggedRange<'k>,
    kv: RaggedRange<'k>,
    q: SharedTile<'k>,
    keys: (SharedTile<'k>, Ring<'k>),
    values: (SharedTile<'k>, Ring<'k>),
    q_full: Barrier<'k>,
}

/// The range of a request in a ragged tensor.
#[derive(Clone, Copy)]
struct RaggedRange<'k> {
    begin: Value<'k, u32>,
    len: Value<'k, u32>,
}

impl<'k> RaggedRange<'k> {
    #[track_caller]
    fn load(indptr: Global<'k, u32>, request: Value<'k, u32>) -> Self {
        let begin = indptr.at(request).load();
        Self { begin, len: indptr.at(request).plus(1).load() - begin }
    }
}

impl<'k, 'v> PrefillCta<'k, 'v> {
    fn new(k: &'k Builder, config: PrefillConfig, hooks: Option<Hooks<'v>>) -> Self {
        let maps = ["q_map", "k_map", "v_map"].map(|name| k.tensor_map(name));
        let (o, lse) = (k.global("o"), k.global("lse"));
        let (qo_indptr, kv_indptr) = (k.global("qo_indptr"), k.global("kv_indptr"));
        let scale = k.param("scale");
        let (request, head) = (k.cta_z(), k.cta_y());
        let known = |input| match input {
            Input::Request => Some(request.to_f32()),
            Input::QoHead => Some(head.to_f32()),
            Input::KvHead => Some((head / (config.heads.0 / config.heads.1.max(1))).to_f32()),
            _ => None,
        };
        let heads = (k.constant(config.heads.0), k.constant(config.heads.1));
        let hook = hooks.map(|hooks| hooks.declare(k, heads).prepare(Hook::Logits, &known));
        // causal: the last rows see most keys, so they are scheduled first
        let tile = if config.causal { k.ctas() - 1 - k.cta() } else { k.cta() };
        Self {
            k,
            config,
            hook,
            maps,
            o,
            lse,
            scale,
            first_row: (tile * Q_ROWS as u32).named("first_row"),
            head,
            qo: RaggedRange::load(qo_indptr, request),
            kv: RaggedRange::load(kv_indptr, request),
            q: SharedTile::new(k, "q", (Q_ROWS, HEAD_DIM), 1),
            keys: (SharedTile::new(k, "keys", (KEYS, HEAD_DIM), STAGES), Ring::new(k, "keys", STAGES)),
            values: (SharedTile::new(k, "values", (KEYS, HEAD_DIM), STAGES), Ring::new(k, "values", STAGES)),
            q_full: k.barriers("q_full", 1),
        }
    }

    fn init(&self) {
        let k = self.k;
        k.when(k.thread().eq(0), || {
            self.q_full.init(1);
            self.keys.1.init(k, CONSUMERS);
            self.values.1.init(k, CONSUMERS);
            k.fence(Fence::MbarrierInit);
        });
        k.sync_threads();
    }

    fn has_rows(&self) -> Value<'k, bool> {
        self.first_row.lt(self.qo.len)
    }

    /// Number of keys that a row sees; may be negative.
    fn visible_keys(&self, row: Value<'k, u32>) -> Value<'k, i32> {
        let len = self.kv.len.reinterpret::<i32>();
        match self.config.causal {
            true => (row.reinterpret::<i32>() + 1 + len - self.qo.len.reinterpret::<i32>()).min(len),
            false => len,
        }
    }

    /// KV tiles that any row of this CTA sees.
    fn tiles(&self) -> Value<'k, u32> {
        let last_row = (self.first_row + (Q_ROWS - 1) as u32).min(self.qo.len - 1);
        let visible = self.visible_keys(last_row).max(0).reinterpret::<u32>();
        ((visible + (KEYS - 1) as u32) / KEYS as u32).named("tiles")
    }

    fn produce(&self) {
        let (k, kv_head) = (self.k, self.head / (self.config.heads.0 / self.config.heads.1));
        k.setmaxnreg_dec(24);
        k.when(k.thread().eq(0), || {
            let left = k.var("left", self.tiles());
            // without KV tiles no consumer waits for the queries
            k.when(left.get().gt(0), || {
                self.q_full.arrive_expecting(self.q.bytes());
                let corner = [self.qo.begin + self.first_row, self.head];
                self.q.load(k, self.maps[0], &corner, self.q_full);
            });
            let (keys, values) = (self.keys.1.cursor(k), self.values.1.cursor(k));
            k.loop_(|| {
                k.break_if(left.get().eq(0));
                left.set(left.get() - 1);
                let row = self.kv.begin + left.get() * KEYS as u32;
                for (map, (tile, _), cursor) in
                    [(self.maps[1], self.keys, keys), (self.maps[2], self.values, values)]
                {
                    let full = cursor.fill(tile.bytes());
                    tile.stage(cursor.stage()).load(k, map, &[row, kv_head], full);
                    cursor.advance();
                }
            });
        });
    }
}

/// A consumer warpgroup, with 64 rows of the CTA.
struct PrefillConsumer<'c, 'k, 'v> {
    cta: &'c PrefillCta<'k, 'v>,
    k: &'k Builder,
    /// Thread index in the warpgroup.
    thread: Value<'k, u32>,
    /// This thread's first row in the request; its second is 8 below.
    row: Value<'k, u32>,
    q: SharedTile<'k>,
    logits: Sums<'k>,
    weights: Vec<Var<'k, u32>>,
    o: Sums<'k>,
    max: [Var<'k, f32>; 2],
    sum: [Var<'k, f32>; 2],
    keys: Cursor<'k>,
    values: Cursor<'k>,
}

impl<'c, 'k, 'v> PrefillConsumer<'c, 'k, 'v> {
    fn new(cta: &'c PrefillCta<'k, 'v>, consumer: Value<'k, u32>) -> Self {
        let k = cta.k;
        k.setmaxnreg_inc(240);
        let thread = (k.thread() & 127).named("thread_of_group");
        let first = consumer << 6;
        Self {
            cta,
            k,
            thread,
            row: (cta.first_row + first + sums::first_row(thread)).named("row"),
            q: cta.q.from_row(first),
            logits: Sums::unset(k, "s", KEYS),
            weights: (0..KEYS / 4).map(|_| k.unset_var("p")).collect(),
            o: Sums::zero(k, "o", HEAD_DIM),
            max: [k.var("max", f32::NEG_INFINITY), k.var("max", f32::NEG_INFINITY)],
            sum: [k.var("sum", 0.0), k.var("sum", 0.0)],
            keys: cta.keys.1.cursor(k),
            values: cta.values.1.cursor(k),
        }
    }

    fn run(&self) {
        let (k, left) = (self.k, self.k.var("left", self.cta.tiles()));
        k.when(left.get().gt(0), || {
            self.cta.q_full.wait(0);
            self.first_tile(left);
            k.loop_(|| {
                k.break_if(left.get().eq(0));
                self.next_tile(left);
            });
            self.last_values();
        });
        self.store();
    }

    /// Logits and weights of the last KV tile; its `P · V` overlaps with the next tile.
    fn first_tile(&self, left: Var<'k, u32>) {
        let k = self.k;
        left.set(left.get() - 1);
        self.keys.wait_full();
        k.wgmma_fence();
        self.multiply_keys();
        k.wgmma_wait(0);
        self.release(self.keys);
        self.softmax(left.get());
        self.pack_weights();
        self.values.wait_full();
        self.zero_missing_values(left.get());
    }

    /// Logits and weights of a tile, overlapped with `P · V` of the previous one.
    fn next_tile(&self, left: Var<'k, u32>) {
        let k = self.k;
        left.set(left.get() - 1);
        self.keys.wait_full();
        k.wgmma_fence();
        self.multiply_keys();
        self.values.wait_full();
        k.wgmma_fence();
        self.multiply_values();
        k.wgmma_wait(1);
        self.release(self.keys);
        let rescale = self.softmax(left.get());
        self.pin_softmax();
        k.wgmma_wait(0);
        self.release(self.values);
        self.o.map(|place, o| o * rescale[place.half]);
        self.pack_weights();
    }

    fn last_values(&self) {
        let k = self.k;
        self.values.wait_full();
        k.wgmma_fence();
        self.multiply_values();
        k.wgmma_wait(0);
        self.release(self.values);
    }

    /// Starts `S = Q · Kᵀ`.
    fn multiply_keys(&self) {
        let keys = self.cta.keys.0.stage(self.keys.stage()).rows_descriptor();
        let q = self.q.rows_descriptor();
        for step in 0..HEAD_DIM / 16 {
            let left = WgmmaLeft::Shared(q.depth_step(step), Major::K);
            let right = keys.depth_step(step);
            let operands = WgmmaOperands { elements: BF16, left, right, right_major: Major::K };
            self.k.wgmma(self.logits.registers(), operands, step > 0);
        }
        self.k.wgmma_commit();
    }

    /// Starts `O += P · V`.
    fn multiply_values(&self) {
        let values = self.cta.values.0.stage(self.values.stage()).columns_descriptor();
        for step in 0..KEYS / 16 {
            let left = WgmmaLeft::Registers(std::array::from_fn(|i| self.weights[4 * step + i].get()));
            let right = values.row_step(step);
            let operands = WgmmaOperands { elements: BF16, left, right, right_major: Major::Mn };
            self.k.wgmma(self.o.registers(), operands, true);
        }
        self.k.wgmma_commit();
    }

    /// One thread of the warpgroup releases the stage.
    fn release(&self, cursor: Cursor<'k>) {
        self.k.when(self.thread.eq(0), || cursor.release());
        cursor.advance();
    }

    /// Converts the logits of KV tile `tile` to weights; returns the rescale factors of the accumulators.
    fn softmax(&self, tile: Value<'k, u32>) -> [Value<'k, f32>; 2] {
        let (k, cta) = (self.k, self.cta);
        let scale = match &cta.hook {
            Some(hook) => {
                let first = (tile * KEYS as u32 + sums::first_column(self.thread)).reinterpret::<i32>();
                self.logits.map(|place, logit| {
                    let at = |input| match input {
                        Input::Qo => Some(self.position(place.half).to_f32()),
                        Input::Kv => Some((first + place.column as i32).to_f32()),
                        _ => None,
                    };
                    hook.logit(&at, logit * cta.scale, k.constant(true))
                });
                k.constant(std::f32::consts::LOG2_E)
            }
            None => cta.scale,
        };
        self.apply_mask(tile);
        std::array::from_fn(|half| {
            let old_max = self.max[half].get();
            let max = self.logits.row_max(half, old_max);
            let reference = finite_max(max);
            let rescale = ((old_max - reference) * scale).exp2();
            self.max[half].set(max);
            let offset = -(reference * scale);
            let mut sum = self.sum[half].get() * rescale;
            for logit in self.logits.row(half) {
                logit.set(logit.get().mul_add(scale, offset).exp2());
                sum = sum + logit.get();
            }
            self.sum[half].set(sum);
            rescale
        })
    }

    /// The position of one of this thread's rows in its request.
    fn position(&self, half: usize) -> Value<'k, i32> {
        let row = (self.row + 8 * half as u32 + self.cta.kv.len).reinterpret::<i32>();
        row - self.cta.qo.len.reinterpret::<i32>()
    }

    /// Masks logits to -inf, in tiles that any row does not see in full.
    fn apply_mask(&self, tile: Value<'k, u32>) {
        let (k, cta) = (self.k, self.cta);
        let first_key = tile * KEYS as u32;
        let end = (first_key + KEYS as u32).reinterpret::<i32>();
        let needs_mask = end.gt(cta.visible_keys(cta.first_row));
        k.when(needs_mask, || {
            let first = (first_key + sums::first_column(self.thread)).reinterpret::<i32>();
            let visible = [0, 8].map(|down| cta.visible_keys(self.row + down) - first);
            self.logits.map(|place, logit| {
                logit.unless(visible[place.half].le(place.column as i32), f32::NEG_INFINITY)
            });
        });
    }

    /// Zeroes values after the last key: they may be NaN, and a weight of 0 times NaN is NaN.
    fn zero_missing_values(&self, tile: Value<'k, u32>) {
        let (k, cta) = (self.k, self.cta);
        let keys = cta.kv.len - tile * KEYS as u32;
        k.when(keys.lt(KEYS as u32), || {
            let values = cta.values.0.stage(self.values.stage());
            let thread = k.thread() - 128;
            let zero = k.constant(0_u32);
            k.repeat((keys + (thread >> 4), KEYS as u32), 16, |row| {
                values.chunk(row, thread & 15).cast::<u32>().store_vector([zero; 4]);
            });
            k.fence(Fence::ProxyAsyncShared);
            k.sync_named(1, 256);
        });
    }

    /// Keeps the softmax before the following wait: the assembler would hoist the wait and end the overlap. The branch is never
    /// taken, but depends on all weights.
    fn pin_softmax(&self) {
        let k = self.k;
        k.when((self.sum[0].get() + self.sum[1].get()).lt(0.0), || {
            k.wgmma_wait(0);
            k.trap();
        });
    }

    /// Rounds the weights to the A operand of `P · V`.
    fn pack_weights(&self) {
        for (pair, weight) in self.weights.iter().enumerate() {
            weight.set(self.logits.pair(self.k, pair).reinterpret::<u32>());
        }
    }

    /// Writes `O / sum` and the LSE.
    fn store(&self) {
        let (k, cta) = (self.k, self.cta);
        let scale = if cta.hook.is_some() { k.constant(std::f32::consts::LOG2_E) } else { cta.scale };
        for half in 0..2 {
            let sum = reduce::quad_sum(self.sum[half].get());
            let normalizer = normalizer(sum);
            let row = self.row + 8 * half as u32;
            k.when(row.lt(cta.qo.len), || {
                let at = (cta.qo.begin + row).to_u64() * u64::from(cta.config.heads.0) + cta.head.to_u64();
                let first = cta.o.at_wide(at * HEAD_DIM as u64).at(sums::first_column(self.thread));
                for pair in (0..self.o.pairs()).filter(|pair| Sums::position(2 * pair).half == half) {
                    let [low, high] = [0, 1].map(|i| self.o.registers()[2 * pair + i].get() * normalizer);
                    let to = first.plus(Sums::position(2 * pair).column);
                    to.cast::<u32>().store(k.bf16x2(low, high).reinterpret::<u32>());
                }
                k.when((self.thread & 3).eq(0), || {
                    let lse = self.max[half].get().mul_add(scale, sum.log2());
                    cta.lse.at_wide(at).store(lse.unless(sum.eq(0.0), f32::NEG_INFINITY));
                });
            });
        }
    }
}
