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
pub struct Product {
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
pub enum Choice {
    /// [`dot`]
    Dot(dot::Dot),
    /// [`skinny`]
    Skinny(skinny::Skinny),
    /// [`sm80`]
    Sm80(sm80::Gemm),
    /// [`tiles`]
    Tiles(tiles::Tiles),
}

/// What all kernels are compiled for: dtypes of the bias and of the result, and whether there are groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Ends {
    /// Of the bias, if there is one.
    pub bias: Option<Dtype>,
    /// Of the result.
    pub out: Dtype,
    /// Whether neighbours of the result are stored two at a time.
    pub pairs: bool,
    /// Whether rows have weights by segments.
    pub grouped: bool,
}

impl Ends {
    /// As it is part of names.
    pub fn name(self) -> String {
        let bias = self.bias.map_or(String::new(), |dtype| format!("_bias_{dtype}"));
        let pairs = if self.pairs { "_pairs" } else { "" };
        let grouped = if self.grouped { "_grouped" } else { "" };
        format!("{}{pairs}{bias}{grouped}", self.out)
    }
}

impl Matrix {
    pub(super) fn alignment(self) -> [u64; 3] {
        Strided { address: self.address, strides: [self.stride, 0] }.alignment(self.dtype)
    }
}

impl Product {
    /// The kernel for a device of so many SMs.
    pub fn choose(&self, multiprocessors: u32) -> Choice {
        let [rows, features, inputs] = self.shape;
        let ends = self.ends();
        let (x, weight) = (self.x.dtype, self.weight.dtype);
        let of_groups = self.groups.map_or(0, |groups| groups.stride);
        let elements = || self.x.alignment().into_iter().chain(self.weight.alignment()).chain([of_groups]);
        let matrix = x == weight && x.size() == 2 && elements().all(|at| at.is_multiple_of(8)) && inputs > 0;
        let few = self.groups.is_none();
        if matrix && few && (5..=32).contains(&rows) && inputs.is_multiple_of(8) {
            return Choice::Skinny(skinny::Skinny {
                elements: x,
                rows: rows.next_power_of_two().max(8),
                ends,
            });
        }
        if few && rows <= dot::MOST {
            let width = chunk::width(&[x, weight], elements().chain([u64::from(inputs)]));
            return Choice::Dot(dot::Dot { x, weight, width, rows: rows.next_power_of_two(), ends });
        }
        if matrix {
            let of_rows = self.groups.map_or(rows, |groups| groups.longest).div_ceil(128);
            let ctas = of_rows * features.div_ceil(128) * self.groups.map_or(1, |groups| groups.segments);
            let large = rows > 64 && ctas >= multiprocessors;
            return Choice::Sm80(sm80::Gemm { elements: x, large, ends });
        }
        let fours = elements().chain([u64::from(inputs)]).all(|at| at.is_multiple_of(4));
        Choice::Tiles(tiles::Tiles { x, weight, width: if fours { 4 } else { 1 }, ends })
    }

    fn ends(&self) -> Ends {
        let even = self.out.alignment().into_iter().chain([u64::from(self.shape[1])]);
        Ends {
            bias: self.bias.map(|bias| bias.0),
            out: self.out.dtype,
            pairs: even.into_iter().all(|at| at.is_multiple_of(2)),
            grouped: self.groups.is_some(),
        }
    }

    /// Grid and arguments for `choice`, which is [`Product::choose`].
    pub fn launch(&self, choice: Choice) -> ([u32; 3], Vec<Arg>) {
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

impl Choice {
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
        let (of_features, of_rows) = match self {
            Self::Dot(_) => (dot::FEATURES, rows),
            Self::Skinny(_) => (skinny::FEATURES, rows),
            Self::Sm80(config) => (config.tile() as u32, config.tile() as u32),
            Self::Tiles(_) => (tiles::TILE, tiles::TILE),
        };
        [features.div_ceil(of_features), rows.div_ceil(of_rows)]
    }
}
