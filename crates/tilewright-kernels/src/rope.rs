//! Rotary embedding of queries and keys in one launch, from a table of cosines and sines.
//!
//! ```text
//! pair (a, b) of a head at angle φ becomes (a · cos φ - b · sin φ, b · cos φ + a · sin φ)
//! ```
//!
//! Shapes: q, q_out `[tokens, qo_heads, head_dim]`, k, k_out `[tokens, kv_heads, head_dim]`, tokens and heads any stride apart, of
//! one dtype, aligned to 16 bytes, and so are strides, which are in elements; positions i32 `[tokens]`, not negative and in the
//! table; cos_sin f32 `[max_positions, rotary_dim]`, each row its `rotary_dim / 2` cosines first, then the sines.
//! Grid: [`Rope::grid`].
//!
//! A thread has two vectors, half of `rotary_dim` apart, of four heads: it reads cosines and sines once for all of them, and has
//! 128 bytes in flight. What is beyond `rotary_dim` is not touched in place, and copied otherwise.

use crate::tile::{Packed, Shares, Vector};
use tilewright_ptx::{
    build::{Builder, Global, Value},
    ir::Kernel,
    isa::memory::Access,
    verify::Invalid,
};

/// Heads of a thread.
const EACH: u32 = 4;

/// Which two elements of a head form pair `i`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Style {
    /// `i` and `i + rotary_dim / 2` (GPT-NeoX).
    Halves,
    /// `2 i` and `2 i + 1` (GPT-J).
    Interleaved,
}

/// What a kernel is made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rope {
    /// Query heads and KV heads.
    pub heads: (u32, u32),
    /// Elements of a head.
    pub head_dim: u32,
    /// Elements of a head that are rotated, the first.
    pub rotary_dim: u32,
    /// What a pair is.
    pub style: Style,
    /// Whether results replace q and k.
    pub in_place: bool,
}

impl Rope {
    fn check<T: Packed>(self, name: &str) -> Result<(), Invalid> {
        let step = 2 * T::PER_VECTOR;
        let fail = |why: String| Err(Invalid::of(name, why));
        let (dim, rotary) = (self.head_dim, self.rotary_dim);
        if dim == 0 || !dim.is_multiple_of(step) || dim > 1 << 12 {
            return fail(format!("head_dim = {dim}, expected a multiple of {step} in {step}..={}", 1 << 12));
        }
        if rotary == 0 || !rotary.is_multiple_of(step) || rotary > dim {
            return fail(format!("rotary_dim = {rotary}, expected a multiple of {step} in {step}..={dim}"));
        }
        for (argument, heads) in [("heads.0", self.heads.0), ("heads.1", self.heads.1)] {
            if heads > 1 << 12 {
                return fail(format!("{argument} = {heads}, expected 0..={}", 1 << 12));
            }
        }
        match self.heads {
            (0, 0) => fail("heads = (0, 0), expected at least one head".to_owned()),
            _ => Ok(()),
        }
    }

    /// Pairs of vectors of a head that are rotated, and that are touched.
    fn columns<T: Packed>(self) -> (u32, u32) {
        let of = |dim: u32| dim / (2 * T::PER_VECTOR);
        (of(self.rotary_dim), of(if self.in_place { self.rotary_dim } else { self.head_dim }))
    }

    /// Groups of heads, of queries and of keys.
    fn groups(self) -> (u32, u32) {
        (self.heads.0.div_ceil(EACH), self.heads.1.div_ceil(EACH))
    }

    fn threads_of_token<T: Packed>(self) -> u32 {
        (self.groups().0 + self.groups().1) * self.columns::<T>().1
    }

    /// The grid for `tokens` tokens of elements `T`.
    pub fn grid<T: Packed>(self, tokens: u32) -> [u32; 3] {
        let [x, y] = Shares::new(self.threads_of_token::<T>()).ctas(tokens);
        [x, y, 1]
    }
}

/// The kernel. Parameters: q, k, and unless in place q_out, k_out; cos_sin, positions; tokens (u32); then as u64
/// q_token_stride, q_head_stride, k_token_stride, k_head_stride, and unless in place the same four of q_out and k_out.
///
/// # Errors
/// When dimensions are not whole pairs of vectors, `rotary_dim` is above `head_dim`, or there are no heads.
pub fn rope<T: Packed>(name: &str, config: Rope) -> Result<Kernel, Invalid> {
    config.check::<T>(name)?;
    let shares = Shares::new(config.threads_of_token::<T>());
    Builder::kernel(name, shares.cta_threads(), |k| {
        let from = [k.global::<T>("q"), k.global::<T>("k")];
        let to = if config.in_place { from } else { [k.global("q_out"), k.global("k_out")] };
        let (cos_sin, positions) = (k.global::<f32>("cos_sin"), k.global::<u32>("positions"));
        let tokens = k.param::<u32>("tokens");
        let from = [("q", from[0]), ("k", from[1])].map(|(name, base)| Heads::new(k, name, base));
        let to = match config.in_place {
            true => from,
            false => [("q_out", to[0]), ("k_out", to[1])].map(|(name, base)| Heads::new(k, name, base)),
        };
        let (token, of_token, is_there) = shares.place(k, tokens);
        k.when(is_there, || {
            let unit = Unit::new::<T>(config, token, of_token);
            let rotation = Rotation { k, config, unit };
            rotation.run(unit.heads(from), unit.heads(to), (cos_sin, positions));
        });
    })
}

/// Where the heads of a tensor are.
#[derive(Clone, Copy)]
struct Heads<'k, T> {
    base: Global<'k, T>,
    token_stride: Value<'k, u64>,
    head_stride: Value<'k, u64>,
}

impl<'k, T: Packed> Heads<'k, T> {
    #[track_caller]
    fn new(k: &'k Builder, name: &str, base: Global<'k, T>) -> Self {
        let stride = |of: &str| k.param::<u64>(&format!("{name}_{of}_stride"));
        Self { base, token_stride: stride("token"), head_stride: stride("head") }
    }

    #[track_caller]
    fn at(self, token: Value<'k, u32>, head: Value<'k, u32>) -> Global<'k, T> {
        self.base.at_wide(token.to_u64() * self.token_stride + head.to_u64() * self.head_stride)
    }
}

/// What a thread has: a pair of vectors of some heads of a token.
#[derive(Clone, Copy)]
struct Unit<'k> {
    token: Value<'k, u32>,
    /// The pair of vectors.
    column: Value<'k, u32>,
    /// Whether its heads are those of queries.
    queries: Value<'k, bool>,
    /// The first of its heads, how far apart they are, and how many there are in all.
    head: Value<'k, u32>,
    step: Value<'k, u32>,
    num_heads: Value<'k, u32>,
}

impl<'k> Unit<'k> {
    #[track_caller]
    fn new<T: Packed>(config: Rope, token: Value<'k, u32>, of_token: Value<'k, u32>) -> Self {
        let columns = config.columns::<T>().1;
        let (group, groups) = ((of_token / columns).named("group"), config.groups());
        let queries = group.lt(groups.0);
        Self {
            token,
            column: (of_token % columns).named("column"),
            queries,
            head: queries.select(group, group - groups.0),
            step: queries.select(groups.0, groups.1),
            num_heads: queries.select(config.heads.0, config.heads.1),
        }
    }

    /// Those of its tensor.
    #[track_caller]
    fn heads<T: Packed>(self, [q, k]: [Heads<'k, T>; 2]) -> Heads<'k, T> {
        let select = |q, k| self.queries.select::<u64>(q, k);
        Heads {
            base: Global::new(select(q.base.address(), k.base.address())),
            token_stride: select(q.token_stride, k.token_stride),
            head_stride: select(q.head_stride, k.head_stride),
        }
    }
}

struct Rotation<'k> {
    k: &'k Builder,
    config: Rope,
    unit: Unit<'k>,
}

impl<'k> Rotation<'k> {
    #[track_caller]
    fn run<T: Packed>(
        &self,
        from: Heads<'k, T>,
        to: Heads<'k, T>,
        (cos_sin, positions): (Global<'k, f32>, Global<'k, u32>),
    ) {
        let (k, unit) = (self.k, self.unit);
        let (rotary, columns) = self.config.columns::<T>();
        let rotated = if rotary == columns { k.constant(true) } else { unit.column.lt(rotary) };
        // behind the rotated vectors, those to copy: halves of what is left
        let first = rotated.select(unit.column, unit.column + rotary) * T::PER_VECTOR;
        let second = first + rotated.select::<u32>(rotary, columns - rotary) * T::PER_VECTOR;
        let loaded: Vec<_> = (0..EACH)
            .map(|i| {
                let head = unit.head + unit.step * i;
                let is_there = head.lt(unit.num_heads);
                let (from, to) = (from.at(unit.token, head), to.at(unit.token, head));
                let load = |at| Vector::load_when(k, is_there, from.at(at), Access::Streaming);
                (is_there, to, [load(first), load(second)])
            })
            .collect();
        let position = positions.at(unit.token).load().to_u64();
        let row = cos_sin.at_wide(position * u64::from(self.config.rotary_dim));
        let angles = self.angles::<T>(row, unit.column.min(rotary - 1));
        for (is_there, to, before) in loaded {
            let after = self.rotate(before, &angles);
            let after = [0, 1].map(|i| after[i].or_else(rotated, before[i]));
            k.when(is_there, || {
                after[0].store(to.at(first));
                after[1].store(to.at(second));
            });
        }
    }

    /// Cosine and sine of each pair of both vectors, in the order in which [`Rotation::rotate`] takes them.
    #[track_caller]
    fn angles<T: Packed>(&self, row: Global<'k, f32>, column: Value<'k, u32>) -> Vec<[Value<'k, f32>; 2]> {
        let (rotary, per_vector) = (self.config.rotary_dim, T::PER_VECTOR);
        let halves = self.config.style == Style::Halves;
        let (parts, len): (&[u32], _) =
            if halves { (&[0], per_vector) } else { (&[0, rotary / 4], per_vector / 2) };
        let mut angles = Vec::new();
        for part in parts {
            let cosines = row.at(column * len).plus(*part as usize);
            let sines = cosines.plus(rotary as usize / 2);
            let both = load(cosines, len).into_iter().zip(load(sines, len));
            angles.extend(both.map(|(cos, sin)| [cos, sin]));
        }
        angles
    }

    #[track_caller]
    fn rotate<T: Packed>(
        &self,
        before: [Vector<'k, T>; 2],
        angles: &[[Value<'k, f32>; 2]],
    ) -> [Vector<'k, T>; 2] {
        let mut numbers = before.map(Vector::numbers);
        let len = T::PER_VECTOR as usize;
        for (i, &[cos, sin]) in angles.iter().enumerate() {
            let [(va, a), (vb, b)] = match self.config.style {
                Style::Halves => [(0, i), (1, i)],
                Style::Interleaved => [(2 * i / len, 2 * i % len), (2 * i / len, 2 * i % len + 1)],
            };
            let (x, y) = (numbers[va][a], numbers[vb][b]);
            numbers[va][a] = x.mul_add(cos, -(y * sin));
            numbers[vb][b] = y.mul_add(cos, x * sin);
        }
        numbers.map(|numbers| Vector::of(self.k, &numbers))
    }
}

/// `len` numbers of a table, 2 or a multiple of 4.
#[track_caller]
fn load<'k>(from: Global<'k, f32>, len: u32) -> Vec<Value<'k, f32>> {
    match len {
        2 => from.load_vector_with::<2>(Access::ReadOnly).to_vec(),
        _ => (0..len as usize)
            .step_by(4)
            .flat_map(|at| from.plus(at).load_vector_with::<4>(Access::ReadOnly))
            .collect(),
    }
}
