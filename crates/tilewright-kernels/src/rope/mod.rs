//! Rotary embedding of queries and keys in one launch, by a table of cosines and sines or by angles computed here.
//!
//! ```text
//! pair (a, b) of a head at angle φ becomes (a · cos φ - b · sin φ, b · cos φ + a · sin φ)
//! ```
//!
//! Shapes: q, q_out `[tokens, qo_heads, head_dim]`, k, k_out `[tokens, kv_heads, head_dim]`, tokens and heads any stride apart, of
//! one dtype to one dtype, each f32, f16 or bf16; positions i32 `[tokens]`, not negative; angles as [`Angles`] says. Sizes are known at launch.
//!
//! A thread has two chunks that hold pairs, of four heads: it has cosines and sines once for all of them, and 128 bytes in flight.
//! What is beyond `rotary_dim` is not touched in place, and copied otherwise.

mod angles;

pub use angles::turns;

use crate::tile::{Chunk, Elements, Shares, Strided, StridedRows, chunk};
use tilewright::{Dtype, rope::RopeStyle};
use tilewright_ptx::{
    build::{Builder, Value},
    ir::Kernel,
    isa::memory::Access,
    sim::Arg,
    verify::Invalid,
};

/// Heads of a thread.
const EACH: u32 = 4;

/// Where cosines and sines come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Angles {
    /// f32 `[max_positions, rotary_dim]`, dense, aligned to 16 bytes: each row its cosines first, then the sines. Positions are in it.
    Table,
    /// u64 `[rotary_dim / 2]`: how far each pair turns with each position, in turns times 2^64 ([`turns`]). Any position.
    Turns,
}

/// What a kernel is made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Rope {
    /// Of q and k, and of q_out and k_out.
    pub dtypes: (Dtype, Dtype),
    /// What a pair is.
    pub style: RopeStyle,
    /// Where cosines and sines come from.
    pub angles: Angles,
    /// Elements that are loaded at once: 1, or [`chunk::most`] of both dtypes.
    pub width: u32,
}

/// One launch.
#[derive(Debug, Clone, Copy)]
pub struct Call {
    /// Of q and k, and of q_out and k_out.
    pub dtypes: (Dtype, Dtype),
    /// What a pair is.
    pub style: RopeStyle,
    /// What is at `angles_at`.
    pub angles: Angles,
    /// Address of the table or of the turns.
    pub angles_at: u64,
    /// Address of the positions.
    pub positions: u64,
    /// How many tokens there are.
    pub tokens: u32,
    /// Query heads and KV heads; there may be none of one of them.
    pub heads: [u32; 2],
    /// Elements of a head, and how many of them are rotated.
    pub dims: [u32; 2],
    /// q and k.
    pub from: [Strided; 2],
    /// q_out and k_out, which may be q and k.
    pub to: [Strided; 2],
}

impl Call {
    /// The kernel for it.
    pub fn rope(&self) -> Rope {
        let [dim, rotary] = self.dims.map(u64::from);
        let (of_from, of_to) = self.dtypes;
        let from = self.from.iter().flat_map(|tensor| tensor.alignment(of_from));
        let elements = from.chain(self.to.iter().flat_map(|tensor| tensor.alignment(of_to)));
        // two chunks each of what is rotated, and of what is not
        let halves = [rotary, dim - rotary].map(|part| if part % 2 == 0 { part / 2 } else { 1 });
        let width = chunk::width(&[of_from, of_to], elements.chain(halves));
        Rope { dtypes: self.dtypes, style: self.style, angles: self.angles, width }
    }

    /// Pairs of chunks of a head that are rotated, and that are touched.
    fn columns(&self) -> [u32; 2] {
        let [dim, rotary] = self.dims;
        let of = |dim: u32| dim.div_ceil(2 * self.rope().width);
        [of(rotary), of(rotary) + if self.from == self.to { 0 } else { of(dim - rotary) }]
    }

    /// Grid and arguments for [`Call::rope`]; there is at least one token and one head.
    pub fn launch(&self) -> ([u32; 3], Vec<Arg>) {
        let [rotated, columns] = self.columns();
        let groups = self.heads.map(|heads| heads.div_ceil(EACH));
        let threads = (groups[0] + groups[1]) * columns;
        let [x, y] = Shares::new(threads).ctas(self.tokens);
        let words = [self.tokens, threads, self.heads[0], self.heads[1], groups[0], groups[1]];
        let words = [&words[..], &[self.dims[0], self.dims[1], rotated, columns]].concat();
        let mut args = vec![Arg::U64(self.angles_at), Arg::U64(self.positions)];
        args.extend(self.from.iter().chain(&self.to).flat_map(|tensor| tensor.args()));
        args.extend(words.into_iter().map(Arg::U32));
        ([x, y, 1], args)
    }
}

impl Rope {
    /// A name that no other configuration has.
    pub fn name(self) -> String {
        let style = match self.style {
            RopeStyle::Neox => "halves",
            RopeStyle::Interleaved => "interleaved",
        };
        let angles = match self.angles {
            Angles::Table => "table",
            Angles::Turns => "turns",
        };
        let (from, to) = self.dtypes;
        let to = if to == from { String::new() } else { format!("_to_{to}") };
        format!("rope_{style}_{angles}_{from}{to}_{}", self.width)
    }
}

/// The kernel of a configuration; its parameters are those of [`Call::launch`].
///
/// # Errors
/// None that a caller of [`Call::rope`] can provoke.
pub fn rope(name: &str, config: Rope) -> Result<Kernel, Invalid> {
    Builder::kernel(name, Shares::THREADS, |k| {
        let (angles, positions) = (k.param::<u64>("angles"), k.global::<u32>("positions"));
        let (of_from, of_to) = config.dtypes;
        let [q, key] = ["q", "k"].map(|name| StridedRows::param(k, name, of_from));
        let [q_out, k_out] = ["q_out", "k_out"].map(|name| StridedRows::param(k, name, of_to));
        let [tokens, threads] = ["tokens", "threads"].map(|name| k.param::<u32>(name));
        let names = ["qo_heads", "kv_heads", "qo_groups", "kv_groups"];
        let [qo_heads, kv_heads, qo_groups, kv_groups] = names.map(|name| k.param::<u32>(name));
        let [dim, rotary, rotated, columns] =
            ["head_dim", "rotary_dim", "rotated", "columns"].map(|name| k.param::<u32>(name));
        let (token, of_token, is_there) = Shares::place(k, (tokens, threads));
        k.when(is_there, || {
            let (group, column) = (of_token / columns, of_token % columns);
            let queries = group.lt(qo_groups);
            let unit = Unit {
                k,
                config,
                token,
                column,
                rotated,
                dims: (dim, rotary),
                head: queries.select(group, group - qo_groups),
                step: queries.select(qo_groups, kv_groups),
                heads: queries.select(qo_heads, kv_heads),
            };
            let (from, to) = (q.or_else(queries, key, of_from), q_out.or_else(queries, k_out, of_to));
            // a load of its own, asked for first
            let position = positions.at(token).load();
            unit.run((from, to), angles, position);
        });
    })
}

/// What a thread has: a pair of chunks of some heads of a token.
struct Unit<'k> {
    k: &'k Builder,
    config: Rope,
    token: Value<'k, u32>,
    /// The pair of chunks, and how many of them are rotated.
    column: Value<'k, u32>,
    rotated: Value<'k, u32>,
    /// Elements of a head, and how many of them are rotated.
    dims: (Value<'k, u32>, Value<'k, u32>),
    /// The first of its heads, how far apart they are, and how many there are in all.
    head: Value<'k, u32>,
    step: Value<'k, u32>,
    heads: Value<'k, u32>,
}

impl<'k> Unit<'k> {
    #[track_caller]
    fn run(
        &self,
        (from, to): (StridedRows<'k>, StridedRows<'k>),
        angles: Value<'k, u64>,
        position: Value<'k, u32>,
    ) {
        let (k, width) = (self.k, self.config.width);
        let is_rotated = self.column.lt(self.rotated);
        let [first, second] = self.places(is_rotated);
        let loaded: Vec<_> = (0..EACH)
            .map(|i| {
                let head = self.head + self.step * i;
                let there = head.lt(self.heads);
                // what is copied one by one may be odd
                let there = [there, there & second.lt(self.dims.0)];
                let (from, to) = (from.row(self.token, head), to.row(self.token, head));
                let load = |at, there| from.at(at).load_when(there, width, Access::Streaming);
                (there, to, [load(first, there[0]), load(second, there[1])])
            })
            .collect();
        let column = self.column.min(self.rotated - 1);
        let angles = self.angles(angles, position, column);
        for (there, to, before) in loaded {
            let after = self.rotate(&before, &angles);
            for (i, place) in [first, second].into_iter().enumerate() {
                let after = after[i].or_else(is_rotated, &before[i].to(self.config.dtypes.1));
                k.when(there[i], || after.store(to.at(place)));
            }
        }
    }

    /// Where its two chunks begin in a head.
    #[track_caller]
    fn places(&self, is_rotated: Value<'k, bool>) -> [Value<'k, u32>; 2] {
        let (width, rotary) = (self.config.width, self.dims.1);
        let neighbours = self.column * (2 * width);
        let pair = match (self.config.style, width) {
            (RopeStyle::Interleaved, 1) => [neighbours, neighbours + 1],
            _ => [self.column * width, self.column * width + (rotary >> 1)],
        };
        let beyond = rotary + (self.column - self.rotated) * (2 * width);
        let copied = [beyond, beyond + width];
        [0, 1].map(|i| is_rotated.select(pair[i], copied[i]))
    }

    /// Cosine and sine of each pair of both chunks, in the order in which [`Unit::rotate`] takes them.
    #[track_caller]
    fn angles(
        &self,
        angles: Value<'k, u64>,
        position: Value<'k, u32>,
        column: Value<'k, u32>,
    ) -> Vec<[Value<'k, f32>; 2]> {
        let (width, half) = (self.config.width, self.dims.1 >> 1);
        // the first of so many pairs side by side; those of the second chunk are a quarter of the head further on
        let (len, parts) = match (self.config.style, width) {
            (RopeStyle::Interleaved, 2..) => {
                (width / 2, vec![column * (width / 2), column * (width / 2) + (half >> 1)])
            }
            _ => (width, vec![column * width]),
        };
        let pairs = parts.into_iter().flat_map(|first| match self.config.angles {
            Angles::Table => {
                let row = Elements::new(angles, Dtype::F32).at_wide(position.to_u64() * self.dims.1.to_u64());
                let (cosines, sines) =
                    (angles::load(row.at(first), len), angles::load(row.at(first + half), len));
                cosines.into_iter().zip(sines).map(|(cos, sin)| [cos, sin]).collect::<Vec<_>>()
            }
            Angles::Turns => angles::computed(angles, (first, len), position),
        });
        pairs.collect()
    }

    #[track_caller]
    fn rotate(&self, before: &[Chunk<'k>; 2], angles: &[[Value<'k, f32>; 2]]) -> [Chunk<'k>; 2] {
        let mut numbers = [before[0].numbers(), before[1].numbers()];
        let len = self.config.width as usize;
        for (i, &[cos, sin]) in angles.iter().enumerate() {
            let [(va, a), (vb, b)] = match self.config.style {
                RopeStyle::Interleaved if len > 1 => {
                    [(2 * i / len, 2 * i % len), (2 * i / len, 2 * i % len + 1)]
                }
                _ => [(0, i), (1, i)],
            };
            let (x, y) = (numbers[va][a], numbers[vb][b]);
            numbers[va][a] = x.mul_add(cos, -(y * sin));
            numbers[vb][b] = y.mul_add(cos, x * sin);
        }
        numbers.map(|numbers| Chunk::of(self.config.dtypes.1, &numbers))
    }
}
