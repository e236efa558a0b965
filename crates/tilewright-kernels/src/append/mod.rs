//! Appends new keys or values to a paged cache, in the layouts NHD and HND, which differ in strides only.
//!
//! ```text
//! stored = value / scale, rounded to the cache's dtype
//! ```
//!
//! Shapes: new `[tokens, kv_heads, head_dim]`; cache pages of `[page_size, kv_heads, head_dim]` in any strides; each of any dtype. Where
//! tokens go is said by [`Places`]; no two go to one slot, and every page is there: the caller has checked. Sizes are known at
//! launch. Scales that grow with what is appended are [`dynamic`].

pub mod dynamic;

use crate::tile::{Elements, Shares, Strided, StridedRows, chunk};
use tilewright::Dtype;
use tilewright_ptx::{
    build::{Builder, Global, Value},
    ir::Kernel,
    isa::memory::Access,
    sim::Arg,
    verify::Invalid,
};

/// Chunks of a thread, all of one token.
const EACH: u32 = 2;

/// How a kernel is told where tokens go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// [`Places::Slots`]
    Slots,
    /// [`Places::Table`]
    Table,
}

/// Where tokens go, in arrays in device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Places {
    /// u32 `[places, 3]`: a token, its page, its slot there.
    Slots {
        /// Its address.
        slots: u64,
        /// How many there are.
        count: u32,
    },
    /// Token t of request `r = batch_indices[t]` goes to slot `positions[t] % page_size` of page
    /// `indices[indptr[r] + positions[t] / page_size]`; r < 0 skips it.
    Table {
        /// i32 `[tokens]`
        batch_indices: u64,
        /// i32 `[tokens]`
        positions: u64,
        /// i32 `[requests + 1]`
        indptr: u64,
        /// i32 `[pages]`
        indices: u64,
        /// Tokens of a page.
        page_size: u32,
        /// How many new tokens there are.
        count: u32,
    },
}

/// What stored values are multiplied with: the number at `at[page · page_stride + head · head_stride]`, or `factor` where `at` is 0.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Scale {
    /// Address of f32, or 0.
    pub at: u64,
    /// How far pages are apart there, in elements.
    pub page_stride: u64,
    /// How far heads are.
    pub head_stride: u64,
    /// The one factor where there is no address.
    pub factor: f32,
}

/// What a kernel is made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Append {
    /// Of new elements, and of the cache's.
    pub dtypes: (Dtype, Dtype),
    /// Elements that are loaded at once: 1, or [`chunk::most`] of both dtypes.
    pub width: u32,
    /// How places are given.
    pub places: Kind,
    /// Whether values are divided by a scale.
    pub scaled: bool,
}

/// A paged cache in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cache {
    /// Of its first element, in bytes.
    pub address: u64,
    /// How far pages, slots and heads are apart, in elements.
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

/// One launch.
#[derive(Debug, Clone, Copy)]
pub struct Call {
    /// Of new elements, and of the cache's.
    pub dtypes: (Dtype, Dtype),
    /// Heads, and elements of a head.
    pub shape: [u32; 2],
    /// New tokens.
    pub new: Strided,
    /// Where they go.
    pub cache: Cache,
    /// To which slots.
    pub places: Places,
    /// What they are divided by; none if by nothing.
    pub scale: Option<Scale>,
}

impl Call {
    /// The kernel for it.
    pub fn append(&self) -> Append {
        let (new, cache) = self.dtypes;
        let elements = self.new.alignment(new).into_iter().chain(self.cache.alignment(cache));
        let width = chunk::width(&[new, cache], elements.chain([u64::from(self.shape[1])]));
        let places = match self.places {
            Places::Slots { .. } => Kind::Slots,
            Places::Table { .. } => Kind::Table,
        };
        Append { dtypes: self.dtypes, width, places, scaled: self.scale.is_some() }
    }

    /// Grid and arguments for [`Call::append`]; there is at least one place and one element.
    pub fn launch(&self) -> ([u32; 3], Vec<Arg>) {
        let [heads, dim] = self.shape;
        let chunks = dim / self.append().width;
        let threads = (heads * chunks).div_ceil(EACH);
        let mut args = [self.new.args().to_vec(), self.cache.args()].concat();
        let count = match self.places {
            Places::Slots { slots, count } => {
                args.push(Arg::U64(slots));
                count
            }
            Places::Table { batch_indices, positions, indptr, indices, page_size, count } => {
                args.extend([batch_indices, positions, indptr, indices].map(Arg::U64));
                args.push(Arg::U32(page_size));
                count
            }
        };
        if let Some(scale) = self.scale {
            args.extend([scale.at, scale.page_stride, scale.head_stride].map(Arg::U64));
            args.push(Arg::F32(scale.factor));
        }
        args.extend([count, threads, heads, chunks].map(Arg::U32));
        let [x, y] = Shares::new(threads).ctas(count);
        ([x, y, 1], args)
    }
}

impl Append {
    /// A name that no other configuration has.
    pub fn name(self) -> String {
        let (new, cache) = self.dtypes;
        let places = match self.places {
            Kind::Slots => "slots",
            Kind::Table => "table",
        };
        let scaled = if self.scaled { "_scaled" } else { "" };
        format!("append_{places}_{new}_{cache}_{}{scaled}", self.width)
    }
}

/// The kernel of a configuration; its parameters are those of [`Call::launch`].
///
/// # Errors
/// None that a caller of [`Call::append`] can provoke.
pub fn append(name: &str, config: Append) -> Result<Kernel, Invalid> {
    Builder::kernel(name, Shares::THREADS, |k| {
        let new = StridedRows::param(k, "new", config.dtypes.0);
        let cache = Elements::param(k, "cache", config.dtypes.1);
        let strides = ["page", "slot", "head"].map(|axis| k.param::<u64>(&format!("cache_{axis}_stride")));
        let table = Table::new(k, config.places);
        let scale = config.scaled.then(|| ScaleOf::new(k));
        let [count, threads, heads, chunks] =
            ["count", "threads", "heads", "chunks"].map(|name| k.param::<u32>(name));
        let (place, first, is_there) = Shares::place(k, (count, threads));
        k.when(is_there, || {
            let token = table.token(place);
            let of_token = |i| {
                let chunk = first + threads * i;
                let (head, column) = (chunk / chunks, chunk % chunks * config.width);
                (chunk.lt(heads * chunks), head, column)
            };
            let load = |i| {
                let (is_there, head, column) = of_token(i);
                new.row(token, head).at(column).load_when(is_there, config.width, Access::Streaming)
            };
            // the way to a page is several loads long; what goes there is on its way meanwhile
            let loaded: Vec<_> = (0..EACH).map(load).collect();
            table.find(k, place, |page, slot| {
                let row = cache.at_wide(page.to_u64() * strides[0] + slot.to_u64() * strides[1]);
                (0..EACH).zip(&loaded).for_each(|(i, loaded)| {
                    let (is_there, head, column) = of_token(i);
                    let to = row.at_wide(head.to_u64() * strides[2]).at(column);
                    let dtype = config.dtypes.1;
                    k.when(is_there, || match &scale {
                        None => loaded.to(dtype).store(to),
                        Some(scale) => loaded.divided(dtype, scale.of(page, head)).store(to),
                    });
                });
            });
        });
    })
}

/// Where tokens go.
enum Table<'k> {
    Slots(Global<'k, u32>),
    Pages {
        batch_indices: Global<'k, i32>,
        positions: Global<'k, u32>,
        indptr: Global<'k, u32>,
        indices: Global<'k, u32>,
        page_size: Value<'k, u32>,
    },
}

impl<'k> Table<'k> {
    #[track_caller]
    fn new(k: &'k Builder, kind: Kind) -> Self {
        match kind {
            Kind::Slots => Self::Slots(k.global("slots")),
            Kind::Table => Self::Pages {
                batch_indices: k.global("batch_indices"),
                positions: k.global("positions"),
                indptr: k.global("indptr"),
                indices: k.global("indices"),
                page_size: k.param("page_size"),
            },
        }
    }

    #[track_caller]
    fn token(&self, place: Value<'k, u32>) -> Value<'k, u32> {
        match self {
            Self::Slots(slots) => slots.at(place * 3).load(),
            Self::Pages { .. } => place,
        }
    }

    /// Calls `body` with the page of a place and its slot there, unless the token is skipped.
    #[track_caller]
    fn find(&self, k: &'k Builder, place: Value<'k, u32>, body: impl FnOnce(Value<'k, u32>, Value<'k, u32>)) {
        match *self {
            Self::Slots(slots) => {
                let at = slots.at(place * 3);
                body(at.plus(1).load(), at.plus(2).load());
            }
            Self::Pages { batch_indices, positions, indptr, indices, page_size } => {
                let request = batch_indices.at(place).load();
                k.when(request.ge(0), || {
                    let position = positions.at(place).load();
                    let entry = indptr.at(request.reinterpret::<u32>()).load() + position / page_size;
                    body(indices.at(entry).load().named("page"), (position % page_size).named("slot"));
                });
            }
        }
    }
}

/// A scale in a kernel.
struct ScaleOf<'k> {
    at: Value<'k, u64>,
    strides: [Value<'k, u64>; 2],
    factor: Value<'k, f32>,
}

impl<'k> ScaleOf<'k> {
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
