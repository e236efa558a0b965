//! What is multiplied, and by which kernel.
//!
//! ```text
//! out[r, f] = Σ x[r, i] · weight[f, i] + bias[f]         summed in f32, rounded once
//! ```
//!
//! In groups, segment s of the rows has a weight of its own, `weights[ids[s]]`.

use super::{dot, skinny, sm80, tiles};
use crate::tile::{Strided, chunk};
use tilewright::Dtype;
use tilewright_ptx::{ir::Kernel, sim::Arg, verify::Invalid};

/// A matrix in memory, whose last axis has stride 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Matrix {
    /// Of its elements.
    pub dtype: Dtype,
    /// Of the first, in bytes.
    pub address: u64,
    /// How far rows are apart, in elements.
    pub stride: u64,
}

/// Segments of rows, each with its weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Groups {
    /// Address of i32 `[segments + 1]`: rows `indptr[s]..indptr[s + 1]` are segment s.
    pub indptr: u64,
    /// Address of i32 `[segments]`: which weight each has; 0: those of their own numbers.
    pub ids: u64,
    /// How many segments there are, at most 2^16 - 1.
    pub segments: u32,
    /// At least as many rows as the longest has.
    pub longest: u32,
    /// How far weights are apart, in elements.
    pub stride: u64,
}

/// One product. There is at least one row and one feature; there may be no inputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GemmParams {
    /// Rows, features, inputs.
    pub shape: [u32; 3],
    /// `[rows, inputs]`
    pub x: Matrix,
    /// `[features, inputs]`
    pub weight: Matrix,
    /// `[features]`, dense: dtype and address.
    pub bias: Option<(Dtype, u64)>,
    /// `[rows, features]`
    pub out: Matrix,
    /// The weights of segments; none where all rows have one.
    pub groups: Option<Groups>,
}

/// A kernel in one configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GemmKernel {
    /// [`dot`]
    Dot(dot::DotConfig),
    /// [`skinny`]
    Skinny(skinny::SkinnyConfig),
    /// [`sm80`]
    Sm80(sm80::Sm80Config),
    /// [`tiles`]
    Tiles(tiles::TilesConfig),
}

/// What all kernels are compiled for: dtypes of the bias and of the result, and whether there are groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Epilogue {
    /// Of the bias, if there is one.
    pub bias: Option<Dtype>,
    /// Of the result.
    pub out: Dtype,
    /// Whether neighbours of the result are stored two at a time.
    pub paired: bool,
    /// Whether rows have weights by segments.
    pub grouped: bool,
}

impl Epilogue {
    /// As it is part of names.
    pub fn name(self) -> String {
        let bias = self.bias.map_or(String::new(), |dtype| format!("_bias_{dtype}"));
        let paired = if self.paired { "_pairs" } else { "" };
        let grouped = if self.grouped { "_grouped" } else { "" };
        format!("{}{paired}{bias}{grouped}", self.out)
    }
}

impl Matrix {
    pub(super) fn alignment(self) -> [u64; 3] {
        Strided { address: self.address, strides: [self.stride, 0] }.alignment(self.dtype)
    }
}

impl GemmParams {
    /// The kernel for a device of so many SMs.
    pub fn choose_kernel(&self, multiprocessors: u32) -> GemmKernel {
        let [rows, features, inputs] = self.shape;
        let epilogue = self.epilogue();
        let (x, weight) = (self.x.dtype, self.weight.dtype);
        let group_stride = self.groups.map_or(0, |groups| groups.stride);
        let elements = || self.x.alignment().into_iter().chain(self.weight.alignment()).chain([group_stride]);
        let tensor_core_layout =
            x == weight && x.size() == 2 && elements().all(|at| at.is_multiple_of(8)) && inputs > 0;
        let ungrouped = self.groups.is_none();
        if tensor_core_layout && ungrouped && (5..=32).contains(&rows) && inputs.is_multiple_of(8) {
            return GemmKernel::Skinny(skinny::SkinnyConfig {
                elements: x,
                rows: rows.next_power_of_two().max(8),
                epilogue,
            });
        }
        if ungrouped && rows <= dot::MAX_ROWS {
            let width = chunk::width(&[x, weight], elements().chain([u64::from(inputs)]));
            return GemmKernel::Dot(dot::DotConfig {
                x,
                weight,
                width,
                rows: rows.next_power_of_two(),
                epilogue,
            });
        }
        if tensor_core_layout {
            let row_tiles = self.groups.map_or(rows, |groups| groups.longest).div_ceil(128);
            let ctas = row_tiles * features.div_ceil(128) * self.groups.map_or(1, |groups| groups.segments);
            let large = rows > 64 && ctas >= multiprocessors;
            return GemmKernel::Sm80(sm80::Sm80Config { elements: x, large, epilogue });
        }
        let aligned_to_4 = elements().chain([u64::from(inputs)]).all(|at| at.is_multiple_of(4));
        GemmKernel::Tiles(tiles::TilesConfig { x, weight, width: if aligned_to_4 { 4 } else { 1 }, epilogue })
    }

    fn epilogue(&self) -> Epilogue {
        let offsets = self.out.alignment().into_iter().chain([u64::from(self.shape[1])]);
        Epilogue {
            bias: self.bias.map(|bias| bias.0),
            out: self.out.dtype,
            paired: offsets.into_iter().all(|at| at.is_multiple_of(2)),
            grouped: self.groups.is_some(),
        }
    }

    /// Grid and arguments for `choice`, which is [`Product::choose`].
    pub fn launch(&self, choice: GemmKernel) -> ([u32; 3], Vec<Arg>) {
        let mut args: Vec<Arg> = [self.x, self.weight, self.out]
            .into_iter()
            .flat_map(|matrix| [Arg::U64(matrix.address), Arg::U64(matrix.stride)])
            .collect();
        args.extend(self.bias.map(|bias| Arg::U64(bias.1)));
        if let Some(groups) = self.groups {
            args.extend([groups.indptr, groups.ids, groups.stride].map(Arg::U64));
        }
        args.extend(self.shape.map(Arg::U32));
        let rows = self.groups.map_or(self.shape[0], |groups| groups.longest);
        let segments = self.groups.map_or(1, |groups| groups.segments);
        let [x, y] = choice.ctas(rows, self.shape[1]);
        ([x, y, segments], args)
    }
}

impl GemmKernel {
    /// A name that no other configuration has.
    pub fn name(self) -> String {
        match self {
            Self::Dot(config) => config.name(),
            Self::Skinny(config) => config.name(),
            Self::Sm80(config) => config.name(),
            Self::Tiles(config) => config.name(),
        }
    }

    /// The kernel; its parameters are those of [`Product::launch`].
    ///
    /// # Errors
    /// None that a caller of [`Product::choose`] can provoke.
    pub fn kernel(self, name: &str) -> Result<Kernel, Invalid> {
        match self {
            Self::Dot(config) => dot::dot(name, config),
            Self::Skinny(config) => skinny::gemm(name, config),
            Self::Sm80(config) => sm80::gemm(name, config),
            Self::Tiles(config) => tiles::gemm(name, config),
        }
    }

    fn ctas(self, rows: u32, features: u32) -> [u32; 2] {
        let (features_per_cta, rows_per_cta) = match self {
            Self::Dot(_) => (dot::FEATURES, rows),
            Self::Skinny(_) => (skinny::FEATURES, rows),
            Self::Sm80(config) => (config.tile() as u32, config.tile() as u32),
            Self::Tiles(_) => (tiles::TILE, tiles::TILE),
        };
        [features.div_ceil(features_per_cta), rows.div_ceil(rows_per_cta)]
    }
}
