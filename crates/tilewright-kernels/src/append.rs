//! Appends new keys and values to a paged cache, in the layouts NHD and HND, which differ in strides only.
//!
//! ```text
//! token t of request r = batch_indices[t] goes to slot positions[t] % page_size
//! of page indices[indptr[r] + positions[t] / page_size]; r < 0 skips the token
//! ```
//!
//! Shapes: k, v `[tokens, kv_heads, head_dim]`; caches pages of `[page_size, kv_heads, head_dim]` in any strides; batch_indices,
//! positions i32 `[tokens]`; indptr `[requests + 1]`, indices `[pages]` u32. All elements are of one dtype, aligned to 16 bytes,
//! and so are strides, which are in elements. No two tokens go to one slot, and every page is there: the caller has checked.
//! Grid: [`Append::grid`].

use crate::tile::{Packed, Shares, Vector};
use tilewright_ptx::{
    build::{Builder, Global, Value},
    ir::Kernel,
    isa::memory::Access,
    verify::Invalid,
};

/// Vectors of a thread, all of one token.
const EACH: u32 = 2;

/// What a kernel is made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Append {
    /// Heads of keys and values.
    pub kv_heads: u32,
    /// Elements of a key's head, and of a value's.
    pub head_dims: (u32, u32),
    /// Tokens of a page.
    pub page_size: u32,
}

impl Append {
    fn check<T: Packed>(self, name: &str) -> Result<(), Invalid> {
        let step = T::PER_VECTOR;
        let fail = |why: String| Err(Invalid::of(name, why));
        for (argument, dim) in [("head_dims.0", self.head_dims.0), ("head_dims.1", self.head_dims.1)] {
            if dim == 0 || !dim.is_multiple_of(step) || dim > 1 << 16 {
                return fail(format!(
                    "{argument} = {dim}, expected a multiple of {step} in {step}..={}",
                    1 << 16
                ));
            }
        }
        if !(1..=1 << 12).contains(&self.kv_heads) {
            return fail(format!("kv_heads = {}, expected 1..={}", self.kv_heads, 1 << 12));
        }
        if self.page_size == 0 {
            return fail("page_size = 0, expected at least 1".to_owned());
        }
        Ok(())
    }

    /// Threads that share a token's keys, or its values.
    fn threads_of_token<T: Packed>(self) -> u32 {
        (self.kv_heads * self.head_dims.0.max(self.head_dims.1) / T::PER_VECTOR).div_ceil(EACH)
    }

    /// The grid for `tokens` tokens of elements `T`; its third dimension is K, then V.
    pub fn grid<T: Packed>(self, tokens: u32) -> [u32; 3] {
        let [x, y] = Shares::new(self.threads_of_token::<T>()).ctas(tokens);
        [x, y, 2]
    }
}

/// The kernel. Parameters: k, v, k_cache, v_cache; batch_indices, positions, indptr, indices; tokens (u32); then as u64
/// k_token_stride, k_head_stride, k_cache_page_stride, k_cache_slot_stride, k_cache_head_stride, and the same five of v.
///
/// # Errors
/// When a head is not a number of whole vectors, or there are no heads or slots.
pub fn append<T: Packed>(name: &str, config: Append) -> Result<Kernel, Invalid> {
    config.check::<T>(name)?;
    let threads_of_token = config.threads_of_token::<T>();
    let shares = Shares::new(threads_of_token);
    Builder::kernel(name, shares.cta_threads(), |k| {
        let new = [k.global::<T>("k"), k.global::<T>("v")];
        let caches = [k.global::<T>("k_cache"), k.global::<T>("v_cache")];
        let table = Table::new(k, config.page_size);
        let tokens = k.param::<u32>("tokens");
        let [keys, values] = ["k", "v"].map(|name| Strides::new(k, name));
        let (token, first, is_there) = shares.place(k, tokens);
        let copy = |which: usize, strides: Strides<'_>, dim: u32| {
            let heads = Heads { k, heads: config.kv_heads, chunks: dim / T::PER_VECTOR };
            let from = new[which].at_wide(token.to_u64() * strides.token);
            // the way to a page is four loads long; what goes there is on its way meanwhile
            let vectors = heads.load((from, strides.head), (first, threads_of_token));
            let request = table.batch_indices.at(token).load();
            k.when(request.ge(0), || {
                let (page, slot) = table.find(request.reinterpret(), token);
                let place = page.to_u64() * strides.page + slot.to_u64() * strides.slot;
                heads.store(&vectors, (caches[which].at_wide(place), strides.cache_head));
            });
        };
        let (qk, vo) = config.head_dims;
        k.when(is_there, || {
            k.when_else(k.cta_z().eq(0), || copy(0, keys, qk), || copy(1, values, vo));
        });
    })
}

/// Where tokens go.
struct Table<'k> {
    page_size: u32,
    batch_indices: Global<'k, i32>,
    positions: Global<'k, u32>,
    indptr: Global<'k, u32>,
    indices: Global<'k, u32>,
}

impl<'k> Table<'k> {
    #[track_caller]
    fn new(k: &'k Builder, page_size: u32) -> Self {
        Self {
            page_size,
            batch_indices: k.global("batch_indices"),
            positions: k.global("positions"),
            indptr: k.global("indptr"),
            indices: k.global("indices"),
        }
    }

    /// The page of a token of `request`, and its slot there.
    #[track_caller]
    fn find(&self, request: Value<'k, u32>, token: Value<'k, u32>) -> (Value<'k, u32>, Value<'k, u32>) {
        let position = self.positions.at(token).load();
        let page = self.indptr.at(request).load() + position / self.page_size;
        (self.indices.at(page).load().named("page"), (position % self.page_size).named("slot"))
    }
}

/// How far apart things are, in elements.
#[derive(Clone, Copy)]
struct Strides<'k> {
    token: Value<'k, u64>,
    head: Value<'k, u64>,
    page: Value<'k, u64>,
    slot: Value<'k, u64>,
    cache_head: Value<'k, u64>,
}

impl<'k> Strides<'k> {
    #[track_caller]
    fn new(k: &'k Builder, name: &str) -> Self {
        let stride = |of: &str| k.param::<u64>(&format!("{name}_{of}_stride"));
        Self {
            token: stride("token"),
            head: stride("head"),
            page: stride("cache_page"),
            slot: stride("cache_slot"),
            cache_head: stride("cache_head"),
        }
    }
}

/// The heads of a token.
struct Heads<'k> {
    k: &'k Builder,
    heads: u32,
    /// Vectors of a head.
    chunks: u32,
}

/// A vector on its way.
struct Part<'k, T> {
    is_there: Value<'k, bool>,
    head: Value<'k, u32>,
    chunk: Value<'k, u32>,
    vector: Vector<'k, T>,
}

impl<'k> Heads<'k> {
    /// Asks for vectors `first`, `first + step`, .. of heads so far apart.
    #[track_caller]
    fn load<T: Packed>(
        &self,
        (from, stride): (Global<'k, T>, Value<'k, u64>),
        (first, step): (Value<'k, u32>, u32),
    ) -> Vec<Part<'k, T>> {
        let vectors = self.heads * self.chunks;
        let part = |i| {
            let vector = first + i * step;
            let (head, chunk) = (vector / self.chunks, vector % self.chunks * T::PER_VECTOR);
            let is_there = vector.lt(vectors);
            let from = from.at_wide(head.to_u64() * stride).at(chunk);
            let vector = Vector::load_when(self.k, is_there, from, Access::Streaming);
            Part { is_there, head, chunk, vector }
        };
        (0..EACH).map(part).collect()
    }

    /// Writes them to heads so far apart.
    #[track_caller]
    fn store<T: Packed>(&self, parts: &[Part<'k, T>], (to, stride): (Global<'k, T>, Value<'k, u64>)) {
        for part in parts {
            let to = to.at_wide(part.head.to_u64() * stride).at(part.chunk);
            self.k.when(part.is_there, || part.vector.store(to));
        }
    }
}
