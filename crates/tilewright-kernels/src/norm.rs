//! RMSNorm, alone or with the residual addition before it: one read and one write of each row, which stays in registers.
//!
//! ```text
//! y = x / sqrt(mean(x²) + eps) · (offset + weight)          summed in f32, rounded once
//! ```
//!
//! Shapes: x, out, residual `[tokens, heads, hidden]`, tokens and heads any stride apart (a tensor `[rows, hidden]` has one head);
//! weight `[hidden]` of any stride; each f32, f16 or bf16. All sizes are known at launch; compiled in are dtypes, the width of chunks
//! and a class of lengths. Rows of more than [`Rows::MAX_CHUNKS`] chunks are read twice.

use crate::tile::{Chunk, Elements, RowPlace, Rows, Strided, StridedRows, chunk, reduce};
use tilewright::Dtype;
use tilewright_ptx::{
    build::{Builder, Shared, Value},
    ir::Kernel,
    isa::memory::Access,
    sim::Arg,
    verify::Invalid,
};

/// Threads of a CTA whose row is read twice.
const LONG: u32 = 512;

/// What a kernel is made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Norm {
    /// Of x.
    pub dtype: Dtype,
    /// Of the result.
    pub out: Dtype,
    /// Of the weight.
    pub weight: Dtype,
    /// Of the residual to which x is added first; none where there is none.
    pub residual: Option<Dtype>,
    /// Whether the result goes with a residual: it replaces x.
    pub in_place: bool,
    /// Elements that are loaded at once: 1, or [`chunk::most`] of all dtypes.
    pub width: u32,
    /// The class of lengths; none for rows that registers do not hold.
    pub rows: Option<Rows>,
}

/// One launch.
#[derive(Debug, Clone, Copy)]
pub struct Call {
    /// Dtypes of x and of the weight.
    pub dtypes: (Dtype, Dtype),
    /// `[tokens, heads, hidden]`.
    pub shape: [u32; 3],
    /// What is normalised, or added to the residual first.
    pub x: Strided,
    /// The residual and its dtype: it receives the sum.
    pub residual: Option<(Strided, Dtype)>,
    /// The result and its dtype; it may replace x.
    pub out: (Strided, Dtype),
    /// Address of the weight, and how far its elements are apart.
    pub weight: (u64, u64),
    /// Added to the mean of squares.
    pub eps: f32,
    /// Added to the weight.
    pub offset: f32,
}

impl Call {
    /// The kernel for it.
    pub fn norm(&self) -> Norm {
        let ((dtype, weight), hidden) = (self.dtypes, self.shape[2]);
        let of_weight = Strided { address: self.weight.0, strides: [0; 2] }.alignment(weight);
        let tensors = [Some((self.x, dtype)), Some(self.out), self.residual];
        let elements = tensors.into_iter().flatten().flat_map(|(at, dtype)| at.alignment(dtype));
        let residual = self.residual.map(|(_, dtype)| dtype);
        let (out, in_place) = (self.out.1, residual.is_some() && self.out == (self.x, dtype));
        let dtypes = [dtype, out, weight, residual.unwrap_or(dtype)];
        let dense = self.weight.1 == 1 || hidden == 1;
        let width = match dense {
            true => chunk::width(&dtypes, elements.chain(of_weight).chain([u64::from(hidden)])),
            false => 1,
        };
        Norm { dtype, out, weight, residual, in_place, width, rows: Rows::for_chunks(hidden / width) }
    }

    /// Grid and arguments for [`Call::norm`]; there is at least one row and one element.
    pub fn launch(&self) -> ([u32; 3], Vec<Arg>) {
        let [tokens, heads, hidden] = self.shape;
        let (norm, rows) = (self.norm(), tokens * heads);
        let ctas = norm.rows.map_or(rows, |of| of.ctas(rows));
        let sizes = [rows, hidden / norm.width, heads].map(Arg::U32);
        let weight = [Arg::U64(self.weight.0), Arg::U64(self.weight.1)];
        let numbers = [self.eps, self.offset, 1.0 / hidden as f32].map(Arg::F32);
        let out = self.out.0.args();
        let (second, last) = match self.residual {
            None => (out, None),
            Some((residual, _)) => (residual.args(), (!norm.in_place).then_some(out)),
        };
        let args = [&self.x.args()[..], &second, &weight, &sizes, &numbers, last.as_slice().as_flattened()];
        ([ctas, 1, 1], args.concat())
    }
}

impl Norm {
    /// A name that no other configuration has.
    pub fn name(self) -> String {
        let what = match (self.residual, self.in_place) {
            (None, _) => "rmsnorm",
            (Some(_), true) => "add_rmsnorm",
            (Some(_), false) => "add_rmsnorm_apart",
        };
        let other = |of: Option<Dtype>, word: &str| {
            of.filter(|of| *of != self.dtype).map_or(String::new(), |of| format!("_{word}_{of}"))
        };
        let (residual, out) = (other(self.residual, "plus"), other(Some(self.out), "to"));
        let rows = self.rows.map_or("long".to_owned(), Rows::name);
        format!("{what}_{}{residual}{out}_{}_{}_{rows}", self.dtype, self.weight, self.width)
    }

    fn cta_threads(self) -> u32 {
        self.rows.map_or(LONG, Rows::cta_threads)
    }
}

/// The kernel of a configuration; its parameters are those of [`Call::launch`].
///
/// # Errors
/// None that a caller of [`Call::norm`] can provoke.
pub fn norm(name: &str, config: Norm) -> Result<Kernel, Invalid> {
    Builder::kernel(name, config.cta_threads(), |k| {
        let x = StridedRows::param(k, "x", config.dtype);
        let y = StridedRows::param(k, "y", config.residual.unwrap_or(config.out));
        let weight = (Elements::param(k, "weight", config.weight), k.param("weight_stride"));
        let [rows, chunks, heads] = ["rows", "chunks", "heads"].map(|name| k.param::<u32>(name));
        let [eps, offset, inverse] = ["eps", "offset", "inverse"].map(|name| k.param::<f32>(name));
        let apart = config.residual.is_some() && !config.in_place;
        let third = apart.then(|| StridedRows::param(k, "out", config.out));
        let tensors = match config.residual {
            None => [x, y, y],
            Some(_) => [x, y, third.unwrap_or(x)],
        };
        let memory = k.shared("sums", config.cta_threads() as usize / 32, 4);
        let row = RowNorm { k, config, weight, eps, offset, inverse, memory };
        match config.rows {
            Some(class) => class.place(k, (rows, chunks), |at| {
                row.held(at, tensors.map(|rows| rows.row(at.row / heads, at.row % heads)));
            }),
            None => row.long(chunks, tensors.map(|rows| rows.row(k.cta() / heads, k.cta() % heads))),
        }
    })
}

/// The norm of one row, by the threads that have it.
struct RowNorm<'k> {
    k: &'k Builder,
    config: Norm,
    weight: (Elements<'k>, Value<'k, u64>),
    eps: Value<'k, f32>,
    offset: Value<'k, f32>,
    /// One over the elements of a row.
    inverse: Value<'k, f32>,
    /// A number for each warp.
    memory: Shared<'k, f32>,
}

impl<'k> RowNorm<'k> {
    /// A row that fits into registers: of x, of the residual, which is looked at only where there is one, and of the result.
    #[track_caller]
    fn held(&self, place: RowPlace<'k>, rows: [Elements<'k>; 3]) {
        let (width, chunks) = (self.config.width, place.chunks());
        let at = |row: Elements<'k>| row.at(place.thread * width);
        let load = |row: Elements<'k>| -> Vec<Chunk<'k>> {
            let of = |chunk: &crate::tile::ChunkPlace<'k>| {
                row.plus(chunk.after_first * width).load_when(chunk.is_there, width, Access::Streaming)
            };
            chunks.iter().map(of).collect()
        };
        let [x, residual_at, out] = rows.map(at);
        let added = load(x);
        let add = self.config.residual.is_some();
        let residual = if add { load(residual_at) } else { Vec::new() };
        // asked for with x, so that it is there when the sum is
        let factors: Vec<_> =
            chunks.iter().map(|at| self.factors(place.thread + at.after_first, at.is_there)).collect();
        let numbers: Vec<_> = added.iter().enumerate().map(|(i, x)| self.sum(x, residual.get(i))).collect();
        if add {
            for (at, numbers) in chunks.iter().zip(&numbers) {
                self.store(at.is_there, numbers, residual_at.plus(at.after_first * width));
            }
        }
        let squares = numbers.iter().flatten().fold(self.k.constant(0.0), |sum, &x| x.mul_add(x, sum));
        let scale = self.scale(place.sum(self.memory, squares));
        for ((at, numbers), factors) in chunks.iter().zip(numbers).zip(factors) {
            let scaled = self.scaled(&numbers, scale, &factors);
            self.store(at.is_there, &scaled, out.plus(at.after_first * width));
        }
    }

    /// A row of any length, by a CTA.
    #[track_caller]
    fn long(&self, chunks: Value<'k, u32>, [x, residual, out]: [Elements<'k>; 3]) {
        let (k, width, add) = (self.k, self.config.width, self.config.residual.is_some());
        let (yes, sum) = (k.constant(true), k.var("squares", 0.0_f32));
        let load = |i: Value<'k, u32>| {
            let at = |row: Elements<'k>| row.at(i * width).load(width, Access::Weak);
            self.sum(&at(x), add.then(|| at(residual)).as_ref())
        };
        k.repeat((k.thread(), chunks), LONG, |i| {
            sum.set(load(i).into_iter().fold(sum.get(), |sum, x| x.mul_add(x, sum)));
        });
        let sum = reduce::over_cta(k, (self.memory, LONG), sum.get(), |x| reduce::warp_sum(x), |a, b| a + b);
        let scale = self.scale(sum);
        k.repeat((k.thread(), chunks), LONG, |i| {
            let (numbers, factors) = (load(i), self.factors(i, yes));
            if add {
                self.store(yes, &numbers, residual.at(i * width));
            }
            self.store(yes, &self.scaled(&numbers, scale, &factors), out.at(i * width));
        });
    }

    /// x, and what it is added to.
    #[track_caller]
    fn sum(&self, x: &Chunk<'k>, residual: Option<&Chunk<'k>>) -> Vec<Value<'k, f32>> {
        let x = x.numbers();
        match residual {
            None => x,
            Some(residual) => x.into_iter().zip(residual.numbers()).map(|(x, y)| x + y).collect(),
        }
    }

    /// The weight of a chunk.
    #[track_caller]
    fn factors(&self, chunk: Value<'k, u32>, is_there: Value<'k, bool>) -> Chunk<'k> {
        let (width, (weight, stride)) = (self.config.width, self.weight);
        let from = match width {
            1 => weight.at_wide(chunk.to_u64() * stride),
            _ => weight.at(chunk * width),
        };
        from.load_when(is_there, width, Access::ReadOnly)
    }

    #[track_caller]
    fn scale(&self, squares: Value<'k, f32>) -> Value<'k, f32> {
        squares.mul_add(self.inverse, self.eps).rsqrt()
    }

    #[track_caller]
    fn scaled(
        &self,
        numbers: &[Value<'k, f32>],
        scale: Value<'k, f32>,
        factors: &Chunk<'k>,
    ) -> Vec<Value<'k, f32>> {
        let factors = factors.numbers().into_iter().map(|factor| factor + self.offset);
        numbers.iter().zip(factors).map(|(&x, factor)| x * scale * factor).collect()
    }

    #[track_caller]
    fn store(&self, condition: Value<'k, bool>, numbers: &[Value<'k, f32>], to: Elements<'k>) {
        let chunk = Chunk::of(to.dtype(), numbers);
        self.k.when(condition, || chunk.store(to));
    }
}
