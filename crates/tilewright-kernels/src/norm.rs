//! RMSNorm, optionally fused with the preceding residual addition, and layer norm.
//!
//! Each row is read and written once and stays in registers.
//!
//! ```text
//! y = x / sqrt(mean(x²) + eps) · (offset + weight)                     accumulated in f32, rounded once
//! y = (x - mean(x)) / sqrt(var(x) + eps) · (offset + weight) + bias    with a bias
//! out = y · (1 / scale)                                                with a scale
//! ```
//!
//! Shapes: x, out, residual `[tokens, heads, hidden]`, any token and head strides (a tensor `[rows, hidden]` has one
//! head); weight, bias `[hidden]` of any stride; each f32, f16 or bf16, and out of any dtype. Sizes are launch parameters. Dtypes,
//! the chunk width and a row length class are compiled in. Rows of more than [`RowPartition::MAX_CHUNKS`] chunks are read
//! twice, or three times with a bias.

use crate::tile::{Chunk, Elements, RowPartition, RowPlace, Strided, chunk, reduce};
use tilewright::Dtype;
use tilewright_ptx::{Access, Arg, Builder, Invalid, Kernel, Shared, Value};

/// Threads of a CTA if its row does not fit into registers.
const LONG_ROW_THREADS: u32 = 512;

/// Compile-time configuration of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct NormConfig {
    /// Dtype of x.
    pub dtype: Dtype,
    /// Dtype of the result.
    pub out: Dtype,
    /// Dtype of the weight.
    pub weight: Dtype,
    /// Dtype of the residual that x is added to first, if there is one.
    pub residual: Option<Dtype>,
    /// Whether the result replaces x; only with a residual.
    pub in_place: bool,
    /// Dtype of the bias of a layer norm; only without a residual.
    pub bias: Option<Dtype>,
    /// Whether the norm is divided by a scale.
    pub scaled: bool,
    /// Elements per load: 1, or `chunk::max_width` of all dtypes.
    pub width: u32,
    /// Thread partition of a row; `None` if rows do not fit into registers.
    pub rows: Option<RowPartition>,
}

crate::params! {
    /// Parameters of one launch.
    #[derive(Debug, Clone, Copy)]
    pub struct NormParams => NormRegs(this, config: NormConfig) {
        /// Dtypes of x and the weight.
        host dtypes: (Dtype, Dtype),
        /// `[tokens, heads, hidden]`.
        host shape: [u32; 3],
        /// Residual and its dtype; the kernel writes the sum to it.
        host residual: Option<(Strided, Dtype)>,
        /// Result and its dtype; it may alias x.
        host out: (Strided, Dtype),
        /// Address, element stride and dtype of the bias of a layer norm.
        host bias: Option<((u64, u64), Dtype)>,
        /// Input of the norm, or of the addition.
        x: Strided[config.dtype],
        /// The residual, or the result without one.
        y: Strided[config.residual.unwrap_or(config.out)] = this.residual.unwrap_or(this.out).0,
        /// Address and element stride of the weight.
        weight: (u64, u64)[config.weight],
        rows: u32 = this.shape[0] * this.shape[1],
        chunks: u32 = this.shape[2] / config.width,
        heads: u32 = this.shape[1],
        /// Added to the mean square.
        eps: f32,
        /// Added to the weight.
        offset: f32,
        inverse: f32 = 1.0 / this.shape[2] as f32,
        /// The result if it replaces neither x nor the residual.
        out: Option<Strided>[config.is_apart().then_some(config.out)] = config.is_apart().then_some(this.out.0),
        bias: Option<(u64, u64)>[config.bias] = this.bias.map(|(bias, _)| bias),
        /// Address of one f32 that divides the norm.
        scale: Option<u64>[config.scaled.then_some(())],
    }
}

impl NormParams {
    /// Configuration of the kernel for this launch.
    pub fn config(&self) -> NormConfig {
        let ((dtype, weight), hidden) = (self.dtypes, self.shape[2]);
        let vectors = [Some((self.weight, weight)), self.bias].into_iter().flatten();
        let vector_alignment = vectors
            .clone()
            .flat_map(|((address, _), dtype)| Strided { address, strides: [0; 2] }.alignment(dtype));
        let tensors = [Some((self.x, dtype)), Some(self.out), self.residual];
        let elements = tensors.into_iter().flatten().flat_map(|(at, dtype)| at.alignment(dtype));
        let residual = self.residual.map(|(_, dtype)| dtype);
        let (out, in_place) = (self.out.1, residual.is_some() && self.out == (self.x, dtype));
        let bias = self.bias.map(|(_, dtype)| dtype);
        let dtypes = [dtype, out, weight, residual.unwrap_or(dtype), bias.unwrap_or(dtype)];
        let dense = vectors.clone().all(|((_, stride), _)| stride == 1) || hidden == 1;
        let width = match dense {
            true => chunk::width(&dtypes, elements.chain(vector_alignment).chain([u64::from(hidden)])),
            false => 1,
        };
        NormConfig {
            dtype,
            out,
            weight,
            residual,
            in_place,
            bias,
            scaled: self.scale.is_some(),
            width,
            rows: RowPartition::for_chunks(hidden / width),
        }
    }

    /// Grid and arguments for [`NormParams::config`]. Requires at least one row and one element.
    pub fn launch(&self) -> ([u32; 3], Vec<Arg>) {
        let (config, rows) = (self.config(), self.shape[0] * self.shape[1]);
        ([config.rows.map_or(rows, |of| of.ctas(rows)), 1, 1], self.args(config))
    }
}

impl NormConfig {
    /// Kernel name, unique per configuration.
    pub fn name(self) -> String {
        let what = match (self.residual, self.in_place) {
            (None, _) if self.bias.is_some() => "layer_norm",
            (None, _) => "rmsnorm",
            (Some(_), true) => "add_rmsnorm",
            (Some(_), false) => "add_rmsnorm_apart",
        };
        let other = |of: Option<Dtype>, word: &str| {
            of.filter(|of| *of != self.dtype).map_or(String::new(), |of| format!("_{word}_{of}"))
        };
        let (residual, out) = (other(self.residual, "plus"), other(Some(self.out), "to"));
        let rows = self.rows.map_or("long".to_owned(), RowPartition::name);
        let bias = self.bias.map_or(String::new(), |bias| format!("_{bias}"));
        let scaled = if self.scaled { "_scaled" } else { "" };
        format!("{what}_{}{residual}{out}_{}{bias}_{}_{rows}{scaled}", self.dtype, self.weight, self.width)
    }

    /// Whether the result has a tensor besides x and the residual.
    fn is_apart(self) -> bool {
        self.residual.is_some() && !self.in_place
    }

    fn cta_threads(self) -> u32 {
        self.rows.map_or(LONG_ROW_THREADS, RowPartition::cta_threads)
    }
}

/// Records the kernel of a configuration. Its parameters are those of [`NormParams::launch`].
///
/// # Errors
/// None for a configuration from [`NormParams::config`].
pub fn norm(name: &str, config: NormConfig) -> Result<Kernel, Invalid> {
    Builder::dependent_kernel(name, config.cta_threads(), |k| {
        let params = NormRegs::declare(k, config);
        let NormRegs { x, y, rows, chunks, heads, .. } = params;
        let tensors = [x, y, params.out.unwrap_or(if config.residual.is_none() { y } else { x })];
        let scale = params.scale.map(|at| Elements::new(at, Dtype::F32).number(Access::ReadOnly));
        let quantization = scale.map(|scale| k.constant(1.0) / scale);
        let warps = config.cta_threads() as usize / 32;
        let memory = k.shared("sums", warps, 4);
        let mean_memory = config.bias.map(|_| k.shared("means", warps, 4));
        let row = RowNorm { k, config, params, quantization, memory, mean_memory };
        match config.rows {
            Some(partition) => partition.place(k, rows, chunks, |at| {
                row.run_in_registers(at, tensors.map(|rows| rows.row(at.row / heads, at.row % heads)));
            }),
            None => row.run_two_pass(chunks, tensors.map(|rows| rows.row(k.cta() / heads, k.cta() % heads))),
        }
    })
}

/// The norm of one row, computed by the threads of its partition.
struct RowNorm<'k> {
    k: &'k Builder,
    config: NormConfig,
    params: NormRegs<'k>,
    /// Multiplies the norm: `1 / scale`.
    quantization: Option<Value<'k, f32>>,
    /// One partial sum per warp.
    memory: Shared<'k, f32>,
    /// The same for the mean of a layer norm.
    mean_memory: Option<Shared<'k, f32>>,
}

/// Weights and biases of a chunk.
struct RowVectors<'k> {
    factors: Chunk<'k>,
    biases: Option<Chunk<'k>>,
}

impl<'k> RowNorm<'k> {
    /// Processes a row in registers. `rows` are x, the residual (unused without one) and the result.
    #[track_caller]
    fn run_in_registers(&self, place: RowPlace<'k>, rows: [Elements<'k>; 3]) {
        let (width, chunks) = (self.config.width, place.chunks());
        let at = |row: Elements<'k>| row.at(place.thread * width);
        let load = |row: Elements<'k>| -> Vec<Chunk<'k>> {
            let of = |chunk: &crate::tile::ChunkPlace<'k>| {
                row.plus(chunk.after_first * width).load_when(chunk.in_bounds, width, Access::Streaming)
            };
            chunks.iter().map(of).collect()
        };
        let [x, residual_at, out] = rows.map(at);
        let added = load(x);
        let add = self.config.residual.is_some();
        let residual = if add { load(residual_at) } else { Vec::new() };
        // issued with x, so that the weights arrive before the sum is known
        let vectors: Vec<_> =
            chunks.iter().map(|at| self.vectors(place.thread + at.after_first, at.in_bounds)).collect();
        let mut numbers: Vec<_> =
            added.iter().enumerate().map(|(i, x)| self.sum(x, residual.get(i))).collect();
        if add {
            for (at, numbers) in chunks.iter().zip(&numbers) {
                self.store(at.in_bounds, numbers, residual_at.plus(at.after_first * width));
            }
        }
        if let Some(memory) = self.mean_memory {
            let total = numbers.iter().flatten().fold(self.k.constant(0.0), |sum, &x| x + sum);
            let mean = place.sum(memory, total) * self.params.inverse;
            for (at, numbers) in chunks.iter().zip(&mut numbers) {
                // elements beyond the row are 0, not -mean
                numbers.iter_mut().for_each(|x| *x = at.in_bounds.select(*x - mean, self.k.constant(0.0)));
            }
        }
        let squares = numbers.iter().flatten().fold(self.k.constant(0.0), |sum, &x| x.mul_add(x, sum));
        let scale = self.scale(place.sum(self.memory, squares));
        for ((at, numbers), vectors) in chunks.iter().zip(numbers).zip(vectors) {
            let scaled = self.scaled(&numbers, scale, &vectors);
            self.store(at.in_bounds, &scaled, out.plus(at.after_first * width));
        }
    }

    /// Processes a row of any length by one CTA, in two passes; a third one before them sums the mean.
    #[track_caller]
    fn run_two_pass(&self, chunks: Value<'k, u32>, [x, residual, out]: [Elements<'k>; 3]) {
        let (k, width, add) = (self.k, self.config.width, self.config.residual.is_some());
        let always = k.constant(true);
        let load = |i: Value<'k, u32>| {
            let at = |row: Elements<'k>| row.at(i * width).load(width, Access::Weak);
            self.sum(&at(x), add.then(|| at(residual)).as_ref())
        };
        let reduce = |memory, term: &dyn Fn(Value<'k, f32>, Value<'k, f32>) -> Value<'k, f32>| {
            let sum = k.var("sum", 0.0_f32);
            k.repeat((k.thread(), chunks), LONG_ROW_THREADS, |i| {
                sum.set(load(i).into_iter().fold(sum.get(), |sum, x| term(x, sum)));
            });
            reduce::over_cta(memory, LONG_ROW_THREADS, sum.get(), |x| reduce::warp_sum(x), |a, b| a + b)
        };
        let mean = self.mean_memory.map(|memory| reduce(memory, &|x, sum| x + sum) * self.params.inverse);
        let centered = |x: Value<'k, f32>| mean.map_or(x, |mean| x - mean);
        let squares = reduce(self.memory, &|x, sum| centered(x).mul_add(centered(x), sum));
        let scale = self.scale(squares);
        k.repeat((k.thread(), chunks), LONG_ROW_THREADS, |i| {
            let (numbers, vectors) = (load(i), self.vectors(i, always));
            if add {
                self.store(always, &numbers, residual.at(i * width));
            }
            let numbers: Vec<_> = numbers.into_iter().map(centered).collect();
            self.store(always, &self.scaled(&numbers, scale, &vectors), out.at(i * width));
        });
    }

    /// x plus the residual, if there is one.
    #[track_caller]
    fn sum(&self, x: &Chunk<'k>, residual: Option<&Chunk<'k>>) -> Vec<Value<'k, f32>> {
        let x = x.numbers();
        match residual {
            None => x,
            Some(residual) => x.into_iter().zip(residual.numbers()).map(|(x, y)| x + y).collect(),
        }
    }

    /// Loads the weights and biases of a chunk.
    #[track_caller]
    fn vectors(&self, chunk: Value<'k, u32>, in_bounds: Value<'k, bool>) -> RowVectors<'k> {
        let width = self.config.width;
        let load = |(vector, stride): (Elements<'k>, Value<'k, u64>)| {
            let from = match width {
                1 => vector.at_wide(chunk.to_u64() * stride),
                _ => vector.at(chunk * width),
            };
            from.load_when(in_bounds, width, Access::ReadOnly)
        };
        RowVectors { factors: load(self.params.weight), biases: self.params.bias.map(load) }
    }

    #[track_caller]
    fn scale(&self, squares: Value<'k, f32>) -> Value<'k, f32> {
        squares.mul_add(self.params.inverse, self.params.eps).rsqrt()
    }

    #[track_caller]
    fn scaled(
        &self,
        numbers: &[Value<'k, f32>],
        scale: Value<'k, f32>,
        vectors: &RowVectors<'k>,
    ) -> Vec<Value<'k, f32>> {
        let factors = vectors.factors.numbers().into_iter().map(|factor| factor + self.params.offset);
        let scaled = numbers.iter().zip(factors).map(|(&x, factor)| x * scale * factor);
        let biases = vectors.biases.as_ref().map(Chunk::numbers);
        let biased = scaled.enumerate().map(|(i, y)| biases.as_ref().map_or(y, |biases| y + biases[i]));
        biased.map(|y| self.quantization.map_or(y, |factor| y * factor)).collect()
    }

    #[track_caller]
    fn store(&self, condition: Value<'k, bool>, numbers: &[Value<'k, f32>], to: Elements<'k>) {
        let chunk = Chunk::of(to.dtype(), numbers);
        self.k.when(condition, || chunk.store(to));
    }
}
