//! Attention without tensor cores: any dtypes, any head dims up to 1024, latent or not, every mask, scale and hook, in f32.
//!
//! It is for what the fast kernels do not take: problems in f32, odd head dims, seldom hooks. All arithmetic is additions and
//! multiplications that IEEE 754 defines, so that results are the same on every GPU and in the simulator.
//!
//! ```text
//! CTA w   its items, one after the other; of an item blocks of `Config::rows` packed rows (token · group + query head of the group)
//! block   Q in shared memory, widened and hooked; for each KV tile of 64 keys:
//!   locate     where the tile's keys are, and their scales                                 locate.rs
//!   products   S = Q · Kᵀ, 32 dims at a time                                               products.rs
//!   weights    hooks and masks, then the online softmax, a row at a time                   weights.rs
//!   values     O = O · factor + P · V, 64 dims at a time                                   values.rs
//! end     output, or a partial state; the last who feeds a merge merges                    finish.rs, merge.rs
//! ```
//!
//! Each warp has a quarter of a block's rows for itself; blocks of up to 8 rows, as decoding has them, have code of their own
//! which spares what more rows would take. KV tiles begin at multiples of 64 keys of the segment, an element of a
//! product is one chain of multiply-adds over ascending keys or dims, and what a row does not see changes nothing: its bits
//! are the same alone and in any batch that is cut alike.
//!
//! Shapes, layouts and arguments: [`call`](super::call). Schedule: [`items`](super::items), with items of one KV head and any
//! number of rows and keys.

mod block;
mod elements;
mod finish;
mod locate;
mod merge;
mod products;
mod rows;
mod values;
mod weights;

use crate::variant::{Arithmetic, Hooks};
use block::Cta;
use tilewright::{
    Dtype,
    attention::variant::{ExpressionVariant, Hook},
};
use tilewright_ptx::{build::Builder, ir::Kernel, verify::Invalid};

/// Threads of a CTA.
pub const THREADS: u32 = 128;
/// Keys of a KV tile.
pub const KEYS: u32 = 64;
/// The largest head dims.
pub const MAX_HEAD_DIM: u32 = 1024;
/// Dims of keys that are in shared memory at once.
const K_DIMS: u32 = 32;
/// From key to key in shared memory: four lanes side by side read four dims each without a conflict.
const K_STRIDE: u32 = K_DIMS + 4;
/// Warps of a CTA.
const WARPS: u32 = THREADS / 32;
/// Rows of a block, each with the shared memory that it may take for it: of 75 KiB three CTAs share an SM of Hopper, two one of
/// sm_80; 99 KiB are what a CTA has on every GPU. 8 rows always fit.
const ROWS: [(u32, usize); 3] = [(32, 75 << 10), (16, 99 << 10), (8, usize::MAX)];
/// A block of at most so many rows for each warp is computed by code of its own.
const FEW_OF_WARP: u32 = 2;

/// What a kernel is made for, beside its variant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Config {
    /// Of queries and outputs: f32, f16 or bf16.
    pub dtype_qo: Dtype,
    /// Of keys and values: any.
    pub dtype_kv: Dtype,
    /// Elements of queries and keys, and of values and outputs, 1 to 1024 each.
    pub head_dim: (u32, u32),
    /// Whether queries and keys come in two tensors, of which the first part of keys is the values: the parts have
    /// `head_dim.1` and `head_dim.0 - head_dim.1` elements.
    pub latent: bool,
}

impl Config {
    /// Packed rows of a block: a tiling of so many, or of several times as many, wastes nothing.
    pub fn rows(self) -> u32 {
        let fits = |(rows, most): &(u32, usize)| self.shared_bytes_of(*rows) <= *most;
        ROWS.into_iter().find(fits).map_or(8, |(rows, _)| rows)
    }

    /// Shared memory of a CTA, about; below 99 KiB, which every GPU from sm_80 on has.
    pub fn shared_bytes(self) -> usize {
        self.shared_bytes_of(self.rows())
    }

    fn shared_bytes_of(self, rows: u32) -> usize {
        let of_row = self.q_stride() + self.o_stride() + KEYS + 10;
        let of_key = 10;
        4 * (rows * of_row + KEYS * of_key + self.stage()) as usize
    }

    /// Elements from row to row of Q in shared memory.
    fn q_stride(self) -> u32 {
        self.head_dim.0.next_multiple_of(K_DIMS)
    }

    /// Dims of values that are in shared memory at once.
    fn v_dims(self) -> u32 {
        if self.head_dim.1 > 32 { 64 } else { 32 }
    }

    /// Elements from row to row of O in shared memory.
    fn o_stride(self) -> u32 {
        self.head_dim.1.next_multiple_of(self.v_dims())
    }

    /// Elements of the part of shared memory that has keys first, then values.
    fn stage(self) -> u32 {
        KEYS * K_STRIDE.max(self.v_dims())
    }

    fn check(self, name: &str, hooks: &Hooks<'_>) -> Result<(), Invalid> {
        let (qk, vo) = self.head_dim;
        let in_range = |dim: u32| (1..=MAX_HEAD_DIM).contains(&dim);
        let pairs = [Hook::Query, Hook::Key].into_iter().any(|hook| hooks.is_live(hook));
        let reasons = [
            (
                self.dtype_qo.is_cache_only(),
                format!("q/o dtype = {}, expected f32, f16 or bf16", self.dtype_qo),
            ),
            (!in_range(qk), format!("head_dim.qk = {qk}, expected 1..={MAX_HEAD_DIM}")),
            (!in_range(vo), format!("head_dim.vo = {vo}, expected 1..={MAX_HEAD_DIM}")),
            (
                self.latent && qk <= vo,
                format!("head_dim = {qk}/{vo} latent, expected more for keys than for values"),
            ),
            (
                pairs && !qk.is_multiple_of(2),
                format!("head_dim.qk = {qk}, expected an even one: a hook needs pairs"),
            ),
        ];
        let wrong: Vec<String> =
            reasons.into_iter().filter_map(|(wrong, why)| wrong.then_some(why)).collect();
        if wrong.is_empty() { Ok(()) } else { Err(Invalid::of(name, wrong.join("; "))) }
    }
}

/// The kernel. Parameters: those of [`Call`](super::call::Call), of which the variant's are
/// [`arguments`](crate::variant::arguments) gives them. Grid: `[workers, 1, 1]`.
///
/// Alignment: that of elements. The plan's `requests` are looked at for items of several requests, and for merges if the
/// variant's update or output hook reads a request or a query's position.
///
/// # Errors
/// When a head dim is 0 or above 1024, or a hook of queries or keys is given an odd one; with all reasons.
pub fn attention(name: &str, config: Config, variant: &ExpressionVariant) -> Result<Kernel, Invalid> {
    let hooks = Hooks::of(name, variant)?.with(Arithmetic::Exact);
    config.check(name, &hooks)?;
    Builder::kernel(name, THREADS, |k| Cta::new(k, config, &hooks).run())
}
