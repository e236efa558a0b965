//! Weight matrices in tiles of 64 output features, as a CPU reads them: one sequential stream per tile.
//!
//! Layout `[ceil(out_features / 64), ceil(in_features / 32)]` blocks, zero-padded, cache-line aligned. A block holds the weights of
//! a group of [`GROUP`] inputs: `[16, 4, 2, 16]`, which are pairs of inputs, panels of 16 features, and the features of both inputs.
//! Quantized matrices store symmetric integers, and the bf16 scales of the 64 features before the weights of a block. An int4 block
//! has `[4, 4, 16]` words of 8 inputs, each plus 8: the even inputs in the low half of a word, the odd ones in its high half. One
//! shift makes a pair of inputs the indices of a 16-bit table lookup.
//!
//! Invariant: every stored weight is exact in f32 (8 bits of scale times at most 8 bits of integer), so a packed matrix and the
//! f32 matrix of [`PackedMatrix::row`] give the same bits. The exception is int4 on a CPU with bf16 dot products: these round the
//! inputs to bf16 and scale the sum of each group, in products of any number of rows.

use crate::{
    Backend, Dtype, Element, Error, Operator, Result, TensorRef, TensorVisitor, View, ViewMut,
    activation::Activation,
    check_computable, check_rows, check_shape, dispatch,
    operator::{shape_name, tensor_bytes},
};
use bytemuck::{Pod, allocation::try_zeroed_vec};
use half::{bf16, f16};
use std::fmt;

const PACK: &str = "gemm.pack";

/// Output features per panel.
pub const PANEL_FEATURES: usize = 16;
pub(crate) const TILE_PANELS: usize = 4;
/// Output features of a tile.
pub(crate) const TILE_FEATURES: usize = TILE_PANELS * PANEL_FEATURES;
/// Inputs of a block, which share a scale.
pub const GROUP: usize = 32;
/// Inputs of an int4 word.
pub(crate) const INT4_INPUTS: usize = 8;
/// Alignment of the first block, in bytes.
const ALIGN: usize = 64;

/// How the weights of a packed matrix are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WeightFormat {
    /// f32, f16 or bf16, without rounding.
    Float(Dtype),
    /// 8-bit integers in -127..=127 and a bf16 scale per group: 8.5 bits per weight.
    Int8,
    /// 4-bit integers in -8..=7 and a bf16 scale per group: 4.5 bits per weight.
    Int4,
}

impl WeightFormat {
    /// Whether weights are rounded to integers.
    pub const fn is_quantized(self) -> bool {
        !matches!(self, Self::Float(_))
    }

    /// The smallest and the largest stored integer of a quantized format.
    pub(crate) fn integer_range(self) -> (i8, i8) {
        if self == Self::Int4 { (-8, 7) } else { (-127, 127) }
    }

    /// Bytes of the scales of a block.
    pub(crate) const fn scale_bytes(self) -> usize {
        if self.is_quantized() { TILE_FEATURES * size_of::<bf16>() } else { 0 }
    }

    /// Bytes of two inputs of a panel.
    pub(crate) const fn pair_bytes(self) -> usize {
        match self {
            Self::Float(dtype) => 2 * PANEL_FEATURES * dtype.size(),
            Self::Int8 => 2 * PANEL_FEATURES,
            Self::Int4 => PANEL_FEATURES,
        }
    }

    pub(crate) const fn block_bytes(self) -> usize {
        self.scale_bytes() + GROUP / 2 * TILE_PANELS * self.pair_bytes()
    }
}

/// A weight matrix `[out_features, in_features]` in tiles.
pub struct PackedMatrix {
    format: WeightFormat,
    shape: [usize; 2],
    /// The tiles, after unused bytes up to `start`.
    memory: Vec<u8>,
    start: usize,
}

/// One tile, writable.
pub(crate) struct TileMut<'a> {
    format: WeightFormat,
    blocks: &'a mut [u8],
}

impl TileMut<'_> {
    fn block(&mut self, group: usize) -> &mut [u8] {
        let bytes = self.format.block_bytes();
        &mut self.blocks[group * bytes..][..bytes]
    }

    /// Writes the weights of a group in a float format.
    pub(crate) fn set_weights<T: Element + Pod>(&mut self, feature: usize, group: usize, weights: &[T]) {
        let to: &mut [T] = bytemuck::cast_slice_mut(self.block(group));
        weights.iter().enumerate().for_each(|(input, weight)| to[weight_index(feature, input)] = *weight);
    }

    /// Writes the scale and the integers of a group, once, to a tile of zeros.
    pub(crate) fn set_group(&mut self, feature: usize, group: usize, scale: bf16, integers: &[i8]) {
        let format = self.format;
        let (scales, weights) = self.block(group).split_at_mut(format.scale_bytes());
        bytemuck::cast_slice_mut(scales)[feature] = scale;
        for (input, integer) in integers.iter().enumerate() {
            if format == WeightFormat::Int4 {
                let (byte, shift) = nibble(feature, input);
                weights[byte] |= (integer + 8).cast_unsigned() << shift;
            } else {
                weights[weight_index(feature, input)] = integer.cast_unsigned();
            }
        }
    }
}

impl PackedMatrix {
    /// A matrix of zeros.
    ///
    /// # Errors
    /// When the allocation fails.
    pub(crate) fn zeroed(format: WeightFormat, shape: [usize; 2]) -> Result<Self> {
        let mut packed = Self { format, shape, memory: Vec::new(), start: 0 };
        let bytes = packed.bytes();
        packed.memory = try_zeroed_vec::<u8>(bytes + ALIGN).map_err(|()| {
            let text = format!("{bytes} bytes of packed weights need memory that this machine does not give");
            Error::new(PACK, text)
        })?;
        packed.start = packed.memory.as_ptr().align_offset(ALIGN);
        Ok(packed)
    }

    /// `[out_features, in_features]`
    pub fn shape(&self) -> [usize; 2] {
        self.shape
    }

    /// How the weights are stored.
    pub fn format(&self) -> WeightFormat {
        self.format
    }

    /// The size in bytes, with scales and padding.
    pub fn bytes(&self) -> usize {
        self.num_tiles() * self.tile_bytes()
    }

    pub(crate) fn num_tiles(&self) -> usize {
        self.shape[0].div_ceil(TILE_FEATURES)
    }

    fn tile_bytes(&self) -> usize {
        self.shape[1].div_ceil(GROUP) * self.format.block_bytes()
    }

    /// The blocks of a tile.
    pub(crate) fn tile(&self, index: usize) -> &[u8] {
        &self.memory[self.start + index * self.tile_bytes()..][..self.tile_bytes()]
    }

    /// All tiles, to be filled. A matrix without inputs has none.
    pub(crate) fn tiles_mut(&mut self) -> Vec<TileMut<'_>> {
        let (total, bytes, format) = (self.bytes(), self.tile_bytes(), self.format);
        let blocks = &mut self.memory[self.start..][..total];
        blocks.chunks_exact_mut(bytes.max(1)).map(|blocks| TileMut { format, blocks }).collect()
    }

    /// The weights of output feature `feature`, as they are multiplied.
    pub fn row(&self, feature: usize) -> Vec<f32> {
        (0..self.shape[1]).map(|input| self.get(feature, input)).collect()
    }

    /// The weight of `input` in output feature `feature`, as it is multiplied.
    pub(crate) fn get(&self, feature: usize, input: usize) -> f32 {
        let (tile, feature) = (self.tile(feature / TILE_FEATURES), feature % TILE_FEATURES);
        let block = &tile[input / GROUP * self.format.block_bytes()..][..self.format.block_bytes()];
        let (scales, weights) = block.split_at(self.format.scale_bytes());
        let (at, scale) = (weight_index(feature, input), || read::<bf16>(scales, feature));
        match self.format {
            WeightFormat::Float(Dtype::F32) => read::<f32>(weights, at),
            WeightFormat::Float(Dtype::F16) => read::<f16>(weights, at),
            WeightFormat::Float(_) => read::<bf16>(weights, at),
            WeightFormat::Int8 => f32::from(weights[at].cast_signed()) * scale(),
            WeightFormat::Int4 => {
                let (byte, shift) = nibble(feature, input);
                (f32::from(weights[byte] >> shift & 15) - 8.0) * scale()
            }
        }
    }
}

/// The index of a weight among those of its block.
fn weight_index(feature: usize, input: usize) -> usize {
    let (panel, lane, input) = (feature / PANEL_FEATURES, feature % PANEL_FEATURES, input % GROUP);
    ((input / 2 * TILE_PANELS + panel) * 2 + input % 2) * PANEL_FEATURES + lane
}

/// The byte of an int4 weight among those of its block, and the position of its lowest bit there.
fn nibble(feature: usize, input: usize) -> (usize, usize) {
    let (panel, lane, input) = (feature / PANEL_FEATURES, feature % PANEL_FEATURES, input % GROUP);
    let word = (input / INT4_INPUTS * TILE_PANELS + panel) * PANEL_FEATURES + lane;
    let pair = input % INT4_INPUTS / 2;
    (word * size_of::<u32>() + input % 2 * 2 + pair / 2, pair % 2 * 4)
}

fn read<T: Element + Pod>(bytes: &[u8], at: usize) -> f32 {
    bytemuck::pod_read_unaligned::<T>(&bytes[at * size_of::<T>()..][..size_of::<T>()]).to_f32()
}

impl fmt::Debug for PackedMatrix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PackedMatrix({:?}, {:?})", self.format, self.shape)
    }
}

/// Rejects a matrix that cannot be packed in `format`.
///
/// # Errors
/// When `weight` is no contiguous f32, f16 or bf16 matrix, or a float format differs from its dtype.
fn check_packable(weight: View<'_>, format: WeightFormat) -> Result<()> {
    let shape = weight.shape();
    crate::ensure!(
        shape.len() == 2,
        PACK,
        "weight has shape {shape:?}, expected [out_features, in_features]"
    );
    check_computable(PACK, "weight", weight.dtype())?;
    crate::ensure!(
        weight.is_contiguous(),
        PACK,
        "weight has strides {:?}, expected a contiguous tensor",
        weight.strides()
    );
    if let WeightFormat::Float(dtype) = format {
        let stored = weight.dtype();
        crate::ensure!(dtype == stored, PACK, "format = {dtype}, expected the weight's dtype {stored}");
    }
    Ok(())
}

/// One of the products of a [`PackedLinear`]: `out = x · weightᵀ + bias`.
#[derive(Debug)]
pub struct PackedProduct<'a> {
    /// The weight and bias.
    pub weight: PackedWeight<'a>,
    /// `[rows, out_features]` f32 or the dtype of `x`, rounded once, with stride 1 along the last axis.
    pub out: ViewMut<'a>,
}

/// The arguments of linear layers of the same input, for example the projections to q, k and v: as [`super::LinearLayer`], bit
/// for bit, in one parallel pass.
#[derive(Debug)]
pub struct PackedLinear<'a> {
    /// `[rows, in_features]` f32, f16 or bf16, with stride 1 along the last axis.
    pub x: View<'a>,
    /// The products, at least one.
    pub products: Vec<PackedProduct<'a>>,
}

impl<'a> Operator<'a> for PackedLinear<'a> {
    fn name(&self) -> &'static str {
        "gemm.packed_linear"
    }

    fn check(&self) -> Result<()> {
        for product in &self.products {
            check_product(self.name(), self.x, &product.weight)?;
            check_out(self.name(), self.x, product.weight.matrix, &product.out)?;
        }
        Ok(())
    }

    fn views(&mut self, visit: &mut TensorVisitor<'_, 'a>) -> Result<()> {
        visit("x", TensorRef::Input(&mut self.x))?;
        for product in &mut self.products {
            if let Some(bias) = &mut product.weight.bias {
                visit("bias", TensorRef::Input(bias))?;
            }
            visit("out", TensorRef::Output(&mut product.out))?;
        }
        Ok(())
    }

    fn profile_name(&self) -> String {
        let features = self.products.iter().map(|product| product.weight.matrix.shape()[0]).sum();
        shape_name(self.name(), &[features, self.x.shape()[1]])
    }

    fn num_bytes(&mut self) -> usize {
        let packed: usize = self.products.iter().map(|product| product.weight.matrix.bytes()).sum();
        packed + tensor_bytes(self)
    }

    dispatch!(packed_linear);
}

/// A packed weight with its bias.
#[derive(Debug, Clone, Copy)]
pub struct PackedWeight<'a> {
    /// `[out_features, in_features]`
    pub matrix: &'a PackedMatrix,
    /// `[out_features]` f32, f16 or bf16, contiguous.
    pub bias: Option<View<'a>>,
}

/// The arguments of a gated projection, `out = act(x · gateᵀ) * (x · upᵀ)`: two linear layers and
/// [`GatedActivation`](crate::activation::GatedActivation) of their f32 outputs, bit for bit, without storing these.
#[derive(Debug)]
pub struct GatedLinear<'a> {
    /// `[rows, in_features]` f32, f16 or bf16, with stride 1 along the last axis.
    pub x: View<'a>,
    /// The weight of the activated factor.
    pub gate: PackedWeight<'a>,
    /// The weight of the other factor, of the same shape.
    pub up: PackedWeight<'a>,
    /// The function of the gate.
    pub activation: Activation,
    /// `[rows, out_features]` f32, f16 or bf16, with stride 1 along the last axis.
    pub out: ViewMut<'a>,
}

impl<'a> Operator<'a> for GatedLinear<'a> {
    fn name(&self) -> &'static str {
        "gemm.gated_linear"
    }

    fn check(&self) -> Result<()> {
        let (operator, Self { x, gate, up, out, .. }) = (self.name(), self);
        check_product(operator, *x, gate)?;
        check_product(operator, *x, up)?;
        let (gates, factors) = (gate.matrix.shape(), up.matrix.shape());
        crate::ensure!(gates == factors, operator, "gate has shape {gates:?}, up has {factors:?}");
        check_shape(operator, "out", out.shape(), &[x.shape()[0], gates[0]], "[rows, out_features]")?;
        check_computable(operator, "out", out.dtype())?;
        check_rows(operator, "out", (out.shape(), out.strides()))
    }

    fn views(&mut self, visit: &mut TensorVisitor<'_, 'a>) -> Result<()> {
        visit("x", TensorRef::Input(&mut self.x))?;
        for bias in [&mut self.gate.bias, &mut self.up.bias].into_iter().flatten() {
            visit("bias", TensorRef::Input(bias))?;
        }
        visit("out", TensorRef::Output(&mut self.out))
    }

    fn profile_name(&self) -> String {
        let (gate, up) = (self.gate.matrix, self.up.matrix);
        shape_name(self.name(), &[gate.shape()[0] + up.shape()[0], gate.shape()[1]])
    }

    fn num_bytes(&mut self) -> usize {
        self.gate.matrix.bytes() + self.up.matrix.bytes() + tensor_bytes(self)
    }

    dispatch!(gated_linear);
}

/// Rejects an input or a bias that does not fit a packed weight.
fn check_product(operator: &'static str, x: View<'_>, weight: &PackedWeight<'_>) -> Result<()> {
    let [features, inputs] = weight.matrix.shape();
    let rows = x.shape().first().copied().unwrap_or(0);
    check_shape(operator, "x", x.shape(), &[rows, inputs], "[rows, in_features]")?;
    check_computable(operator, "x", x.dtype())?;
    check_rows(operator, "x", (x.shape(), x.strides()))?;
    let Some(bias) = weight.bias else { return Ok(()) };
    check_shape(operator, "bias", bias.shape(), &[features], "[out_features]")?;
    super::check_operand(operator, "bias", &bias)
}

fn check_out(operator: &'static str, x: View<'_>, weight: &PackedMatrix, out: &ViewMut<'_>) -> Result<()> {
    let shape = [x.shape()[0], weight.shape()[0]];
    check_shape(operator, "out", out.shape(), &shape, "[rows, out_features]")?;
    check_rows(operator, "out", (out.shape(), out.strides()))?;
    super::check_out_dtype(operator, x.dtype(), out.dtype())
}

/// Packs `weight`, `[out_features, in_features]` f32, f16 or bf16 and contiguous, as `format` says. `None`: this backend multiplies
/// row-major weights.
///
/// # Errors
/// When the weight does not fit the format, or memory is exhausted.
pub fn pack<B: Backend + ?Sized>(
    backend: &B,
    weight: View<'_>,
    format: WeightFormat,
) -> Result<Option<PackedMatrix>> {
    check_packable(weight, format)?;
    backend.pack(weight, format)
}
