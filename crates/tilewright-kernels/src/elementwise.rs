//! Elementwise operators: `x ← f(x)`, and `residual ← residual + x; out ← residual` without a norm.
//!
//! Shapes: x, residual, out `[rows, width]`, any row stride; x and out f32, f16 or bf16, residual f32. Sizes and parameters
//! of the functions are launch parameters. Computed in f32, rounded once.

use crate::{
    tile::{Chunk, Strided, chunk},
    variant::elementary::tanh,
};
use tilewright::Dtype;
use tilewright_ptx::{Access, Arg, Builder, Invalid, Kernel, Value};

const THREADS: u32 = 128;
const CHUNKS_PER_THREAD: u32 = 2;

/// Maximum width: the second dimension of a grid is limited to 2^16 - 1 CTAs.
pub const MAX_WIDTH: u32 = 0xffff * CHUNKS_PER_THREAD * THREADS;

pub use tilewright::elementwise::ElementFunction;

/// The function of a kernel, without its parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MapKind {
    /// [`ElementFunction::Scale`]
    Scale,
    /// [`ElementFunction::SoftCap`]
    SoftCap,
}

/// Compile-time configuration of [`map`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MapConfig {
    /// The function.
    pub kind: MapKind,
    /// Dtype of the elements.
    pub dtype: Dtype,
    /// Elements per load: 1, or `chunk::max_width`.
    pub width: u32,
}

crate::params! {
    /// Parameters of one launch of [`map`].
    #[derive(Debug, Clone, Copy)]
    pub struct MapParams => MapRegs(this, config: MapConfig) {
        /// The function and its parameter.
        host function: ElementFunction,
        /// Dtype of the elements.
        host dtype: Dtype,
        /// `[rows, width]`
        host shape: [u32; 2],
        /// The elements, in place.
        x: Strided[config.dtype],
        parameter: f32 = match this.function {
            ElementFunction::Scale { factor: parameter } | ElementFunction::SoftCap { cap: parameter } => parameter,
        },
        chunks: u32 = this.shape[1] / config.width,
    }
}

/// Compile-time configuration of [`add`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct AddConfig {
    /// Dtypes of x and out.
    pub dtypes: (Dtype, Dtype),
    /// Elements per load: 1, or `chunk::max_width` of all dtypes.
    pub width: u32,
}

crate::params! {
    /// Parameters of one launch of [`add`].
    #[derive(Debug, Clone, Copy)]
    pub struct AddParams => AddRegs(this, config: AddConfig) {
        /// Dtypes of x and out.
        host dtypes: (Dtype, Dtype),
        /// `[rows, width]`
        host shape: [u32; 2],
        /// The addend.
        x: Strided[config.dtypes.0],
        /// The f32 sum, in place.
        residual: Strided[Dtype::F32],
        /// The rounded sum.
        out: Strided[config.dtypes.1],
        chunks: u32 = this.shape[1] / config.width,
    }
}

impl MapParams {
    /// Configuration of the kernel for this launch.
    pub fn config(&self) -> MapConfig {
        let kind = match self.function {
            ElementFunction::Scale { .. } => MapKind::Scale,
            ElementFunction::SoftCap { .. } => MapKind::SoftCap,
        };
        let elements = self.x.alignment(self.dtype).into_iter().chain([u64::from(self.shape[1])]);
        MapConfig { kind, dtype: self.dtype, width: chunk::width(&[self.dtype], elements) }
    }

    /// Grid and arguments for [`MapParams::config`]. Requires at least one element and at most [`MAX_WIDTH`] per row.
    pub fn launch(&self) -> ([u32; 3], Vec<Arg>) {
        (grid(self.shape, self.config().width), self.args(self.config()))
    }
}

impl AddParams {
    /// Configuration of the kernel for this launch.
    pub fn config(&self) -> AddConfig {
        let tensors = [(self.x, self.dtypes.0), (self.residual, Dtype::F32), (self.out, self.dtypes.1)];
        let elements = tensors.iter().flat_map(|(rows, dtype)| rows.alignment(*dtype));
        let width =
            chunk::width(&tensors.map(|(_, dtype)| dtype), elements.chain([u64::from(self.shape[1])]));
        AddConfig { dtypes: self.dtypes, width }
    }

    /// Grid and arguments for [`AddParams::config`]. Requires at least one element and at most [`MAX_WIDTH`] per row.
    pub fn launch(&self) -> ([u32; 3], Vec<Arg>) {
        (grid(self.shape, self.config().width), self.args(self.config()))
    }
}

impl MapConfig {
    /// Kernel name, unique per configuration.
    pub fn name(self) -> String {
        let function = match self.kind {
            MapKind::Scale => "scale",
            MapKind::SoftCap => "soft_cap",
        };
        format!("{function}_{}_{}", self.dtype, self.width)
    }
}

impl AddConfig {
    /// Kernel name, unique per configuration.
    pub fn name(self) -> String {
        format!("add_{}_to_{}_{}", self.dtypes.0, self.dtypes.1, self.width)
    }
}

fn grid([rows, width]: [u32; 2], chunk: u32) -> [u32; 3] {
    [rows, (width / chunk).div_ceil(CHUNKS_PER_THREAD * THREADS), 1]
}

/// A thread's chunks: the index of each, and whether it is within the row.
fn chunks<'k>(k: &'k Builder, count: Value<'k, u32>) -> [(Value<'k, u32>, Value<'k, bool>); 2] {
    let first = (k.cta_y() * (THREADS * CHUNKS_PER_THREAD) + k.thread()).named("chunk");
    [0, 1].map(|i| (first + i * THREADS, (first + i * THREADS).lt(count)))
}

/// Records the kernel of a configuration. Its parameters are those of [`MapParams::launch`].
///
/// # Errors
/// None for a configuration from [`MapParams::config`].
pub fn map(name: &str, config: MapConfig) -> Result<Kernel, Invalid> {
    Builder::dependent_kernel(name, THREADS, |k| {
        let MapRegs { x, parameter, chunks: count } = MapRegs::declare(k, config);
        let x = x.row(k.cta(), k.constant(0));
        let loaded = chunks(k, count).map(|(chunk, in_bounds)| {
            let at = x.at(chunk * config.width);
            (at, in_bounds, at.load_when(in_bounds, config.width, Access::Streaming))
        });
        for (at, in_bounds, chunk) in loaded {
            let mapped = |x: Value<'_, f32>| match config.kind {
                MapKind::Scale => parameter * x,
                MapKind::SoftCap => parameter * tanh(x / parameter),
            };
            let numbers: Vec<_> = chunk.numbers().into_iter().map(mapped).collect();
            let chunk = Chunk::of(config.dtype, &numbers);
            k.when(in_bounds, || chunk.store(at));
        }
    })
}

/// Records the kernel of a configuration. Its parameters are those of [`AddParams::launch`].
///
/// # Errors
/// None for a configuration from [`AddParams::config`].
pub fn add(name: &str, config: AddConfig) -> Result<Kernel, Invalid> {
    Builder::dependent_kernel(name, THREADS, |k| {
        let AddRegs { x, residual, out, chunks: count } = AddRegs::declare(k, config);
        let [x, residual, out] = [x, residual, out].map(|rows| rows.row(k.cta(), k.constant(0)));
        let loaded = chunks(k, count).map(|(chunk, in_bounds)| {
            let at = chunk * config.width;
            let [x, sum] =
                [x, residual].map(|from| from.at(at).load_when(in_bounds, config.width, Access::Streaming));
            (at, in_bounds, x, sum)
        });
        for (at, in_bounds, x, sum) in loaded {
            let sums: Vec<_> = x.numbers().into_iter().zip(sum.numbers()).map(|(x, sum)| x + sum).collect();
            let (wide, rounded) = (Chunk::of(Dtype::F32, &sums), Chunk::of(config.dtypes.1, &sums));
            k.when(in_bounds, || {
                wide.store(residual.at(at));
                rounded.store(out.at(at));
            });
        }
    })
}
