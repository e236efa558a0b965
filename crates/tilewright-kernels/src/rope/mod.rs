//! Rotary embedding of queries and keys in one launch, from a cosine/sine table or from angles computed in the
//! kernel.
//!
//! ```text
//! pair (a, b) of a head at angle φ becomes (a · cos φ - b · sin φ, b · cos φ + a · sin φ)
//! ```
//!
//! Shapes: q, q_out `[tokens, qo_heads, head_dim]`, k, k_out `[tokens, kv_heads, head_dim]`, any token and head
//! strides. q and k share one dtype, q_out and k_out another; each f32, f16 or bf16, and results also of 8 bits, scaled by a factor
//! of queries or keys. Elements beyond `rotary_dim` may be in tensors of their own. Positions are i32 `[tokens]`,
//! not negative; for angles see [`Angles`]. Sizes are launch parameters.
//!
//! A thread processes a pair of chunks in each of four heads: it loads or computes its cosines and sines once, and
//! has 128 bytes in flight. Elements beyond `rotary_dim` are copied, or skipped in place.

mod angles;
pub mod append;

pub use angles::turns;

use crate::{
    params::{GlobalArray, each},
    tile::{Chunk, Elements, Strided, StridedRows, TokenPartition, chunk},
};
use tilewright::{Dtype, rope::RopeStyle};
use tilewright_ptx::{Access, Arg, Builder, Invalid, Kernel, Value};

const HEADS_PER_THREAD: u32 = 4;

/// Source of cosines and sines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Angles {
    /// f32 `[max_positions, rotary_dim]`, dense, aligned to 16 bytes; each row holds the cosines, then the sines.
    /// Every position must be below `max_positions`.
    Table,
    /// u64 `[rotary_dim / 2]`: angle per position of each pair, in turns times 2^64 ([`turns`]). Any position.
    Turns,
}

/// Compile-time configuration of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RopeConfig {
    /// Dtypes of the inputs and of the outputs.
    pub dtypes: (Dtype, Dtype),
    /// Pairing of elements.
    pub style: RopeStyle,
    /// Source of cosines and sines.
    pub angles: Angles,
    /// Whether elements beyond `rotary_dim` are in tensors of their own.
    pub split: bool,
    /// Whether results are multiplied by factors.
    pub scaled: bool,
    /// Elements per load: 1, or `chunk::max_width` of both dtypes.
    pub width: u32,
}

crate::params! {
    /// Parameters of one launch.
    #[derive(Debug, Clone, Copy)]
    pub struct RopeParams => RopeRegs(this, config: RopeConfig) {
        /// Dtypes of the inputs and of the outputs.
        host dtypes: (Dtype, Dtype),
        /// Pairing of elements.
        host style: RopeStyle,
        /// Format of the array at `angles_address`.
        host angles: Angles,
        /// Address of the table or of the turns.
        angles_address "angles": u64,
        /// Address of the positions.
        positions: u64 as GlobalArray<u32>,
        /// q and k.
        from "": [Strided; 2][each(["q", "k"], config.dtypes.0)],
        /// q_out and k_out; may alias q and k.
        to "": [Strided; 2][each(["q_out", "k_out"], config.dtypes.1)],
        /// Number of tokens.
        tokens: u32,
        threads: u32 = this.threads(config.width),
        /// Query heads and KV heads; one of them may be 0.
        heads "": [u32; 2][each(["qo_heads", "kv_heads"], ())],
        groups "": [u32; 2][each(["qo_groups", "kv_groups"], ())] = this.groups(),
        /// `[head_dim, rotary_dim]`
        dims "": [u32; 2][each(["head_dim", "rotary_dim"], ())],
        columns "": [u32; 2][each(["rotated", "columns"], ())] = this.columns(config.width),
        /// Elements beyond `rotary_dim` of q, k, q_out and k_out in tensors of their own.
        rest "": Option<[Strided; 4]>[config.split.then_some({
            let (from, to) = config.dtypes;
            [("q_rest", from), ("k_rest", from), ("q_rest_out", to), ("k_rest_out", to)]
        })],
        /// Factors of q_out and k_out.
        factors "": Option<[f32; 2]>[config.scaled.then_some(each(["q_factor", "k_factor"], ()))],
    }
}

impl RopeParams {
    /// Configuration of the kernel for this launch.
    pub fn config(&self) -> RopeConfig {
        let [dim, rotary] = self.dims.map(u64::from);
        let (from_dtype, to_dtype) = self.dtypes;
        let from = self.from.iter().flat_map(|tensor| tensor.alignment(from_dtype));
        let elements = from.chain(self.to.iter().flat_map(|tensor| tensor.alignment(to_dtype)));
        let rest = self.rest.iter().flatten().zip([from_dtype, from_dtype, to_dtype, to_dtype]);
        let elements = elements.chain(rest.flat_map(|(tensor, dtype)| tensor.alignment(dtype)));
        let table = (self.angles == Angles::Table).then_some(self.angles_address);
        let table = table.map(|address| Strided { address, strides: [0; 2] }.alignment(Dtype::F32));
        let elements = elements.chain(table.into_iter().flatten());
        // the rotated part and the rest have two chunks per pair
        let halves = [rotary, dim - rotary].map(|part| if part % 2 == 0 { part / 2 } else { 1 });
        let width = chunk::width(&[from_dtype, to_dtype], elements.chain(halves));
        let (split, scaled) = (self.rest.is_some(), self.factors.is_some());
        RopeConfig { dtypes: self.dtypes, style: self.style, angles: self.angles, split, scaled, width }
    }

    /// Chunk pairs per head: rotated ones, and all processed ones.
    fn columns(&self, width: u32) -> [u32; 2] {
        let [dim, rotary] = self.dims;
        let of = |dim: u32| dim.div_ceil(2 * width);
        [of(rotary), of(rotary) + if self.from == self.to { 0 } else { of(dim - rotary) }]
    }

    fn groups(&self) -> [u32; 2] {
        self.heads.map(|heads| heads.div_ceil(HEADS_PER_THREAD))
    }

    /// Threads per token.
    fn threads(&self, width: u32) -> u32 {
        self.groups().iter().sum::<u32>() * self.columns(width)[1]
    }

    /// Grid and arguments for [`RopeParams::config`]. Requires at least one token and one head.
    pub fn launch(&self) -> ([u32; 3], Vec<Arg>) {
        let config = self.config();
        let [x, y] = TokenPartition::new(self.threads(config.width)).ctas(self.tokens);
        ([x, y, 1], self.args(config))
    }
}

impl RopeConfig {
    /// Kernel name, unique per configuration.
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
        let split = if self.split { "_split" } else { "" };
        let scaled = if self.scaled { "_scaled" } else { "" };
        format!("rope_{style}_{angles}_{from}{to}_{}{split}{scaled}", self.width)
    }
}

/// Records the kernel of a configuration. Its parameters are those of [`RopeParams::launch`].
///
/// # Errors
/// None for a configuration from [`RopeParams::config`].
pub fn rope(name: &str, config: RopeConfig) -> Result<Kernel, Invalid> {
    Builder::dependent_kernel(name, TokenPartition::THREADS, |k| {
        let p = RopeRegs::declare(k, config);
        let ([q, key], [q_out, k_out]) = (p.from, p.to);
        let ([qo_heads, kv_heads], [qo_groups, kv_groups]) = (p.heads, p.groups);
        let ([rotated, columns], (from_dtype, to_dtype)) = (p.columns, config.dtypes);
        let (token, thread_of_token, in_bounds) = TokenPartition::locate(k, p.tokens, p.threads);
        k.when(in_bounds, || {
            let (group, column) = (thread_of_token / columns, thread_of_token % columns);
            let queries = group.lt(qo_groups);
            let thread = RopeThread {
                k,
                config,
                token,
                column,
                rotated,
                dims: p.dims,
                head: queries.select(group, group - qo_groups),
                head_stride: queries.select(qo_groups, kv_groups),
                heads: queries.select(qo_heads, kv_heads),
                factor: p.factors.map(|[of_q, of_k]| queries.select(of_q, of_k)),
            };
            let (from, to) = (q.or_else(queries, key, from_dtype), q_out.or_else(queries, k_out, to_dtype));
            let (from, to) = p.rest.map_or((from, to), |[q, key, q_out, k_out]| {
                let is_rotated = column.lt(rotated);
                let rest = (q.or_else(queries, key, from_dtype), q_out.or_else(queries, k_out, to_dtype));
                (from.or_else(is_rotated, rest.0, from_dtype), to.or_else(is_rotated, rest.1, to_dtype))
            });
            // issued first: the angles depend on it
            let position = p.positions.at(token).load();
            thread.run(from, to, p.angles_address, position);
        });
    })
}

/// One thread: a pair of chunks in several heads of one token.
struct RopeThread<'k> {
    k: &'k Builder,
    config: RopeConfig,
    token: Value<'k, u32>,
    /// The chunk pair of this thread, and the number of rotated pairs.
    column: Value<'k, u32>,
    rotated: Value<'k, u32>,
    /// `[head_dim, rotary_dim]`
    dims: [Value<'k, u32>; 2],
    /// First head of this thread, stride to the next, and number of heads.
    head: Value<'k, u32>,
    head_stride: Value<'k, u32>,
    heads: Value<'k, u32>,
    /// Multiplies results.
    factor: Option<Value<'k, f32>>,
}

impl<'k> RopeThread<'k> {
    #[track_caller]
    fn run(
        &self,
        from: StridedRows<'k>,
        to: StridedRows<'k>,
        angles: Value<'k, u64>,
        position: Value<'k, u32>,
    ) {
        let (k, width) = (self.k, self.config.width);
        let is_rotated = self.column.lt(self.rotated);
        let [first, second] = self.chunk_offsets(is_rotated);
        let [dim, rotary] = self.dims;
        let limit = if self.config.split { is_rotated.select(rotary, dim - rotary) } else { dim };
        let loaded: Vec<_> = (0..HEADS_PER_THREAD)
            .map(|i| {
                let head = self.head + self.head_stride * i;
                let in_bounds = head.lt(self.heads);
                // at width 1 the copied part may have an odd length
                let in_bounds = [in_bounds, in_bounds & second.lt(limit)];
                let (from, to) = (from.row(self.token, head), to.row(self.token, head));
                let load = |at, in_bounds| from.at(at).load_when(in_bounds, width, Access::Streaming);
                (in_bounds, to, [load(first, in_bounds[0]), load(second, in_bounds[1])])
            })
            .collect();
        let column = self.column.min(self.rotated - 1);
        let angles = self.angles(angles, position, column);
        for (in_bounds, to, before) in loaded {
            let mut after = self.rotate(&before, &angles);
            if let Some(factor) = self.factor {
                // selected before the conversion to 8 bits, which takes many registers
                for (after, before) in after.iter_mut().zip(&before) {
                    let pairs = after.iter_mut().zip(before.numbers());
                    pairs.for_each(|(after, before)| *after = is_rotated.select(*after, before) * factor);
                }
            }
            let dtype = self.config.dtypes.1;
            let after = after.map(|numbers| Chunk::of(dtype, &numbers));
            for (i, place) in [first, second].into_iter().enumerate() {
                let after = match self.factor {
                    Some(_) => after[i].clone(),
                    None => after[i].or_else(is_rotated, &before[i].to(dtype)),
                };
                k.when(in_bounds[i], || after.store(to.at(place)));
            }
        }
    }

    /// Element offsets of the two chunks in a head.
    #[track_caller]
    fn chunk_offsets(&self, is_rotated: Value<'k, bool>) -> [Value<'k, u32>; 2] {
        let (width, rotary) = (self.config.width, self.dims[1]);
        let adjacent = self.column * (2 * width);
        let pair = match (self.config.style, width) {
            (RopeStyle::Interleaved, 1) => [adjacent, adjacent + 1],
            _ => [self.column * width, self.column * width + (rotary >> 1)],
        };
        let beyond = (self.column - self.rotated) * (2 * width);
        let beyond = if self.config.split { beyond } else { rotary + beyond };
        let copied = [beyond, beyond + width];
        [0, 1].map(|i| is_rotated.select(pair[i], copied[i]))
    }

    /// Cosine and sine of each pair in both chunks, in the order that [`RopeThread::rotate`] expects.
    #[track_caller]
    fn angles(
        &self,
        angles: Value<'k, u64>,
        position: Value<'k, u32>,
        column: Value<'k, u32>,
    ) -> Vec<[Value<'k, f32>; 2]> {
        let (width, half) = (self.config.width, self.dims[1] >> 1);
        // runs of `len` pairs; the run of the second chunk begins a quarter of the rotated part later
        let (len, parts) = match (self.config.style, width) {
            (RopeStyle::Interleaved, 2..) => {
                (width / 2, vec![column * (width / 2), column * (width / 2) + (half >> 1)])
            }
            _ => (width, vec![column * width]),
        };
        let pairs = parts.into_iter().flat_map(|first| match self.config.angles {
            Angles::Table => {
                let row =
                    Elements::new(angles, Dtype::F32).at_wide(position.to_u64() * self.dims[1].to_u64());
                let (cosines, sines) =
                    (angles::load(row.at(first), len), angles::load(row.at(first + half), len));
                cosines.into_iter().zip(sines).map(|(cos, sin)| [cos, sin]).collect::<Vec<_>>()
            }
            Angles::Turns => angles::compute(angles, first, len, position),
        });
        pairs.collect()
    }

    #[track_caller]
    fn rotate(&self, before: &[Chunk<'k>; 2], angles: &[[Value<'k, f32>; 2]]) -> [Vec<Value<'k, f32>>; 2] {
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
        numbers
    }
}
