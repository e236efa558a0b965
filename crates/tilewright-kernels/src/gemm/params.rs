//! Launch parameters of a matrix product, and kernel selection.
//!
//! ```text
//! out[r, f] = Σ x[r, i] · weight[f, i] + bias[f]         accumulated in f32, rounded once
//! ```
//!
//! A grouped product has one weight per segment of rows: segment s uses `weights[ids[s]]`.

use super::{dot, skinny, sm80, sm90, tiles};
use crate::{
    params::{GlobalArray, each},
    tile::{Strided, chunk},
};
use tilewright::Dtype;
use tilewright_ptx::{Arg, Invalid, Kernel};

crate::params! {
    /// A matrix in memory with a dense last axis.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct Matrix => MatrixRegs(this) {
        /// Dtype of its elements.
        host dtype: Dtype,
        /// Byte address of the first element.
        address "": u64,
        /// Row stride, in elements.
        stride "_stride": u64,
    }

    /// Row segments with one weight each.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct Groups => GroupRegs(this) {
        /// Address of i32 `[segments + 1]`: segment s is rows `indptr[s]..indptr[s + 1]`.
        indptr: u64 as GlobalArray<u32>,
        /// Address of i32 `[segments]`, the weight index of each segment; 0 for `0..segments`.
        ids: u64,
        /// Number of segments, at most 2^16 - 1.
        host segments: u32,
        /// Upper bound of rows per segment.
        host longest: u32,
        /// Weight stride, in elements.
        stride "group_stride": u64,
    }

    /// Parameters of one product. Requires at least one row and one feature; inputs may be 0.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct GemmParams => GemmRegs(this, epilogue: Epilogue) {
        /// `[rows, inputs]`
        x: Matrix,
        /// `[features, inputs]`
        weight: Matrix,
        /// `[rows, features]`
        out: Matrix,
        /// `[features]`, dense: dtype and address.
        host bias: Option<(Dtype, u64)>,
        bias: Option<u64>[epilogue.bias.map(|_| ())] = this.bias.map(|(_, address)| address),
        /// Segments, if the product is grouped.
        groups "": Option<Groups>[epilogue.grouped.then_some(())],
        /// `[rows, features, inputs]`
        shape "": [u32; 3][each(["rows", "features", "inputs"], ())],
    }
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
    /// [`sm90`]
    Sm90(sm90::Sm90Config),
    /// [`tiles`]
    Tiles(tiles::TilesConfig),
}

/// Compile-time epilogue options that all kernels share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Epilogue {
    /// Dtype of the bias, if there is one.
    pub bias: Option<Dtype>,
    /// Dtype of the result.
    pub out: Dtype,
    /// Whether adjacent results are stored two at a time.
    pub paired: bool,
    /// Whether the product is grouped.
    pub grouped: bool,
}

impl Epilogue {
    /// Part of kernel names.
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
    /// Selects the kernel for a device of this architecture and number of SMs.
    pub fn choose_kernel(&self, arch: u32, multiprocessors: u32) -> GemmKernel {
        let [rows, features, inputs] = self.shape;
        let epilogue = self.epilogue();
        let (x, weight) = (self.x.dtype, self.weight.dtype);
        let group_stride = self.groups.map_or(0, |groups| groups.stride);
        let elements = || self.x.alignment().into_iter().chain(self.weight.alignment()).chain([group_stride]);
        let tensor_core_layout =
            x == weight && x.size() == 2 && elements().all(|at| at.is_multiple_of(8)) && inputs > 0;
        let ungrouped = self.groups.is_none();
        if tensor_core_layout && ungrouped && (5..=32).contains(&rows) && inputs.is_multiple_of(8) {
            let has_few_ctas = features.div_ceil(skinny::FEATURES) <= multiprocessors;
            return GemmKernel::Skinny(skinny::SkinnyConfig {
                elements: x,
                warps: if has_few_ctas { 16 } else { 8 },
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
        if tensor_core_layout && ungrouped && arch == sm90::ARCH && rows > 64 {
            let tiles = |columns: u32| rows.div_ceil(sm90::TILE_ROWS as u32) * features.div_ceil(columns);
            let tile_columns = if tiles(256) >= multiprocessors { 256 } else { 128 };
            return GemmKernel::Sm90(sm90::Sm90Config { elements: x, tile_columns, epilogue });
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

    /// Grid and arguments for the kernel that [`GemmParams::choose_kernel`] returned for a device with this number of SMs.
    pub fn launch(&self, choice: GemmKernel, multiprocessors: u32) -> ([u32; 3], Vec<Arg>) {
        let rows = self.groups.map_or(self.shape[0], |groups| groups.longest);
        let segments = self.groups.map_or(1, |groups| groups.segments);
        let [x, y] = choice.ctas(rows, self.shape[1]);
        let args = self.args(self.epilogue());
        match choice {
            // a CTA processes several tiles
            GemmKernel::Sm90(config) => {
                let maps = config.maps([self.x, self.weight], self.shape);
                ([x.saturating_mul(y).min(multiprocessors), 1, 1], [maps, args].concat())
            }
            _ => ([x, y, segments], args),
        }
    }
}

impl GemmKernel {
    /// Kernel name, unique per configuration.
    pub fn name(self) -> String {
        match self {
            Self::Dot(config) => config.name(),
            Self::Skinny(config) => config.name(),
            Self::Sm80(config) => config.name(),
            Self::Sm90(config) => config.name(),
            Self::Tiles(config) => config.name(),
        }
    }

    /// Records the kernel. Its parameters are those of [`GemmParams::launch`].
    ///
    /// # Errors
    /// None for a configuration from [`GemmParams::choose_kernel`].
    pub fn kernel(self, name: &str) -> Result<Kernel, Invalid> {
        match self {
            Self::Dot(config) => dot::dot(name, config),
            Self::Skinny(config) => skinny::gemm(name, config),
            Self::Sm80(config) => sm80::gemm(name, config),
            Self::Sm90(config) => sm90::gemm(name, config),
            Self::Tiles(config) => tiles::gemm(name, config),
        }
    }

    fn ctas(self, rows: u32, features: u32) -> [u32; 2] {
        let (features_per_cta, rows_per_cta) = match self {
            Self::Dot(_) => (dot::FEATURES, rows),
            Self::Skinny(_) => (skinny::FEATURES, rows),
            Self::Sm80(config) => (config.tile() as u32, config.tile() as u32),
            Self::Sm90(config) => (config.tile_columns as u32, sm90::TILE_ROWS as u32),
            Self::Tiles(_) => (tiles::TILE, tiles::TILE),
        };
        [features.div_ceil(features_per_cta), rows.div_ceil(rows_per_cta)]
    }
}
