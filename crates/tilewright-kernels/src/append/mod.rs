//! Appends new keys or values to a paged cache. The layouts NHD and HND differ in strides only.
//!
//! ```text
//! stored = value / scale, rounded to the cache's dtype
//! ```
//!
//! Shapes: new `[tokens, kv_heads, head_dim]`; cache pages `[page_size, kv_heads, head_dim]` in any strides; each of
//! any dtype. [`SlotMapping`] maps tokens to slots, which are distinct.
//! Sizes are launch parameters. For scales that grow with the appended values see [`dynamic`].

pub mod dynamic;
mod slot_lookup;

use crate::tile::{Elements, Strided, StridedRows, TokenPartition, chunk};
use slot_lookup::SlotLookup;
use tilewright::Dtype;
use tilewright_ptx::{
    build::{Builder, Global, Value},
    ir::Kernel,
    isa::memory::Access,
    sim::Arg,
    verify::Invalid,
};

/// Chunks per thread, all of one token.
const CHUNKS_PER_THREAD: u32 = 2;

/// Format of a [`SlotMapping`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SlotMappingKind {
    /// [`SlotMapping::Slots`]
    Slots,
    /// [`SlotMapping::Table`]
    Table,
    /// [`SlotMapping::Unchecked`]
    Unchecked,
    /// [`SlotMapping::Numbers`]
    Numbers,
}

/// Destination slots of tokens, as arrays in device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SlotMapping {
    /// u32 `[count, 3]`: token, page, slot in the page.
    Slots {
        /// Address of the array.
        slots: u64,
        /// Number of entries.
        count: u32,
    },
    /// Token t of request `r = batch_indices[t]` is written to slot `positions[t] % page_size` of page
    /// `indices[indptr[r] + positions[t] / page_size]`; a negative r skips it.
    Table {
        /// i32 `[tokens]`
        batch_indices: u64,
        /// i32 `[tokens]`
        positions: u64,
        /// i32 `[requests + 1]`
        indptr: u64,
        /// i32 `[pages]`
        indices: u64,
        /// Tokens per page.
        page_size: u32,
        /// Number of new tokens.
        count: u32,
    },
    /// [`SlotMapping::Table`] with arrays that the host has not checked. A token is skipped if its request, its position in
    /// the pages of the request, or its page is out of range.
    Unchecked {
        /// The addresses of [`SlotMapping::Table`]: batch_indices, positions, indptr, indices.
        arrays: [u64; 4],
        /// Tokens per page.
        page_size: u32,
        /// Number of requests.
        num_requests: u32,
        /// Number of entries of indices.
        num_indices: u32,
        /// Number of pages of the cache.
        num_pages: u32,
        /// Number of new tokens.
        count: u32,
    },
    /// Token t is written to slot `n % page_size` of page `n / page_size` with `n = numbers[t]`; a number that is not in
    /// `0..num_slots` skips it.
    Numbers {
        /// i64 `[tokens]`
        numbers: u64,
        /// Tokens per page.
        page_size: u32,
        /// Number of slots of the cache.
        num_slots: u32,
        /// Number of new tokens.
        count: u32,
    },
}

/// Scale of stored values: element `page · page_stride + head · head_stride` of the array at `at`, or `factor` if
/// `at` is 0.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Scale {
    /// Address of f32 scales, or 0.
    pub at: u64,
    /// Page stride, in elements.
    pub page_stride: u64,
    /// Head stride, in elements.
    pub head_stride: u64,
    /// Uniform scale if `at` is 0.
    pub factor: f32,
}

/// Compile-time configuration of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct AppendConfig {
    /// Dtypes of new elements and of the cache.
    pub dtypes: (Dtype, Dtype),
    /// Elements per load: 1, or [`chunk::max_width`] of both dtypes.
    pub width: u32,
    /// Format of the slot mapping.
    pub slot_mapping: SlotMappingKind,
    /// Whether values are divided by a scale.
    pub scaled: bool,
}

/// A paged cache in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cache {
    /// Byte address of the first element.
    pub address: u64,
    /// Strides of pages, slots and heads, in elements.
    pub strides: [u64; 3],
}

impl Cache {
    fn alignment(self, dtype: Dtype) -> Vec<u64> {
        let slots = Strided { address: self.address, strides: [self.strides[0], self.strides[1]] };
        slots.alignment(dtype).into_iter().chain([self.strides[2]]).collect()
    }

    fn args(self) -> Vec<Arg> {
        [&[self.address][..], &self.strides].concat().into_iter().map(Arg::U64).collect()
    }
}

/// Parameters of one launch.
#[derive(Debug, Clone, Copy)]
pub struct AppendParams {
    /// Dtypes of new elements and of the cache.
    pub dtypes: (Dtype, Dtype),
    /// `[kv_heads, head_dim]`
    pub shape: [u32; 2],
    /// New tokens.
    pub new: Strided,
    /// Destination cache.
    pub cache: Cache,
    /// Destination slots.
    pub slot_mapping: SlotMapping,
    /// Divisor of values, if there is one.
    pub scale: Option<Scale>,
}

impl AppendParams {
    /// Configuration of the kernel for this launch.
    pub fn config(&self) -> AppendConfig {
        let (new, cache) = self.dtypes;
        let elements = self.new.alignment(new).into_iter().chain(self.cache.alignment(cache));
        let width = chunk::width(&[new, cache], elements.chain([u64::from(self.shape[1])]));
        let slot_mapping = match self.slot_mapping {
            SlotMapping::Slots { .. } => SlotMappingKind::Slots,
            SlotMapping::Table { .. } => SlotMappingKind::Table,
            SlotMapping::Unchecked { .. } => SlotMappingKind::Unchecked,
            SlotMapping::Numbers { .. } => SlotMappingKind::Numbers,
        };
        AppendConfig { dtypes: self.dtypes, width, slot_mapping, scaled: self.scale.is_some() }
    }

    /// Grid and arguments for [`AppendParams::config`]. Requires at least one entry and one element.
    pub fn launch(&self) -> ([u32; 3], Vec<Arg>) {
        let [heads, dim] = self.shape;
        let chunks = dim / self.config().width;
        let threads = (heads * chunks).div_ceil(CHUNKS_PER_THREAD);
        let mut args = [self.new.args().to_vec(), self.cache.args()].concat();
        let count = match self.slot_mapping {
            SlotMapping::Slots { slots, count } => {
                args.push(Arg::U64(slots));
                count
            }
            SlotMapping::Table { batch_indices, positions, indptr, indices, page_size, count } => {
                args.extend([batch_indices, positions, indptr, indices].map(Arg::U64));
                args.push(Arg::U32(page_size));
                count
            }
            SlotMapping::Unchecked { arrays, page_size, num_requests, num_indices, num_pages, count } => {
                args.extend(arrays.map(Arg::U64));
                args.extend([page_size, num_requests, num_indices, num_pages].map(Arg::U32));
                count
            }
            SlotMapping::Numbers { numbers, page_size, num_slots, count } => {
                args.push(Arg::U64(numbers));
                args.extend([page_size, num_slots].map(Arg::U32));
                count
            }
        };
        if let Some(scale) = self.scale {
            args.extend([scale.at, scale.page_stride, scale.head_stride].map(Arg::U64));
            args.push(Arg::F32(scale.factor));
        }
        args.extend([count, threads, heads, chunks].map(Arg::U32));
        let [x, y] = TokenPartition::new(threads).ctas(count);
        ([x, y, 1], args)
    }
}

impl AppendConfig {
    /// Kernel name, unique per configuration.
    pub fn name(self) -> String {
        let (new, cache) = self.dtypes;
        let slot_mapping = match self.slot_mapping {
            SlotMappingKind::Slots => "slots",
            SlotMappingKind::Table => "table",
            SlotMappingKind::Unchecked => "unchecked",
            SlotMappingKind::Numbers => "numbers",
        };
        let scaled = if self.scaled { "_scaled" } else { "" };
        format!("append_{slot_mapping}_{new}_{cache}_{}{scaled}", self.width)
    }
}

/// Records the kernel of a configuration. Its parameters are those of [`AppendParams::launch`].
///
/// # Errors
/// None for a configuration from [`AppendParams::config`].
pub fn append(name: &str, config: AppendConfig) -> Result<Kernel, Invalid> {
    Builder::kernel(name, TokenPartition::THREADS, |k| {
        let new = StridedRows::param(k, "new", config.dtypes.0);
        let cache = Elements::param(k, "cache", config.dtypes.1);
        let strides = ["page", "slot", "head"].map(|axis| k.param::<u64>(&format!("cache_{axis}_stride")));
        let lookup = SlotLookup::new(k, config.slot_mapping);
        let scale = config.scaled.then(|| ScaleRegs::new(k));
        let [count, threads, heads, chunks] =
            ["count", "threads", "heads", "chunks"].map(|name| k.param::<u32>(name));
        let (index, first, in_bounds) = TokenPartition::locate(k, (count, threads));
        k.when(in_bounds, || {
            let token = lookup.token(index);
            let locate_chunk = |i| {
                let chunk = first + threads * i;
                let (head, column) = (chunk / chunks, chunk % chunks * config.width);
                (chunk.lt(heads * chunks), head, column)
            };
            let load = |i| {
                let (in_bounds, head, column) = locate_chunk(i);
                new.row(token, head).at(column).load_when(in_bounds, config.width, Access::Streaming)
            };
            // the page lookup is a chain of dependent loads: prefetch the values before it
            let loaded: Vec<_> = (0..CHUNKS_PER_THREAD).map(load).collect();
            lookup.find(k, index, |page, slot| {
                let row = cache.at_wide(page.to_u64() * strides[0] + slot.to_u64() * strides[1]);
                (0..CHUNKS_PER_THREAD).zip(&loaded).for_each(|(i, loaded)| {
                    let (in_bounds, head, column) = locate_chunk(i);
                    let to = row.at_wide(head.to_u64() * strides[2]).at(column);
                    let dtype = config.dtypes.1;
                    k.when(in_bounds, || match &scale {
                        None => loaded.to(dtype).store(to),
                        Some(scale) => loaded.divided(dtype, scale.of(page, head)).store(to),
                    });
                });
            });
        });
    })
}

/// A [`Scale`] in registers.
struct ScaleRegs<'k> {
    at: Value<'k, u64>,
    strides: [Value<'k, u64>; 2],
    factor: Value<'k, f32>,
}

impl<'k> ScaleRegs<'k> {
    #[track_caller]
    fn new(k: &'k Builder) -> Self {
        let strides = |axis: &str| k.param(&format!("scale_{axis}_stride"));
        Self {
            at: k.param("scale_at"),
            strides: [strides("page"), strides("head")],
            factor: k.param("factor"),
        }
    }

    #[track_caller]
    fn of(&self, page: Value<'k, u32>, head: Value<'k, u32>) -> Value<'k, f32> {
        let k = page.builder();
        let scale = k.var::<f32>("scale", self.factor);
        k.when(self.at.ne(0), || {
            let index = page.to_u64() * self.strides[0] + head.to_u64() * self.strides[1];
            scale.set(Global::<f32>::new(self.at).at_wide(index).load());
        });
        scale.get()
    }
}
