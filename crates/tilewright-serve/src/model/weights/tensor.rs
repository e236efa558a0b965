//! One weight: read-only, row-major elements, borrowed from the file's map if they are aligned for their type. Its entry is the
//! location, storage and row order in the file.
//!
//! A tensor keeps its map alive, so it may outlive the [`super::Weights`] it came from.

use super::OPERATOR;
use crate::model::gguf::BlockType;
use memmap2::Mmap;
use std::{borrow::Cow, fmt, ops::Range, sync::Arc};
use tilewright::{
    Backend, Dtype, Element, Error, Result, View,
    tensor::{Buffer, Data, copy},
    with_dtype,
};

/// A weight of the model.
#[derive(Clone)]
pub struct Tensor {
    storage: Storage,
    dtype: Dtype,
    shape: Vec<usize>,
}

#[derive(Clone)]
enum Storage {
    /// Aligned for the dtype; [`Tensor::new`] checks this.
    Mapped(Arc<Mmap>, Range<usize>),
    /// The elements, in host or device memory.
    Owned(Arc<Buffer>),
}

impl Tensor {
    /// The tensor of `entry`: borrowed if it is aligned and in row order, dequantized to f32 if it has blocks, else copied.
    pub(super) fn new(name: &str, entry: &TensorEntry) -> Result<Self> {
        let shape = entry.shape.clone();
        let len = shape.iter().product();
        let tensor = match entry.encoding {
            Encoding::Blocks(kind) => {
                let mut values = Buffer::on_host(Dtype::F32, len)?;
                let to = values.view_mut(&[len])?.into_slice::<f32>().into_iter().flatten();
                to.zip(kind.dequantize(&entry.ordered())).for_each(|(to, value)| *to = value);
                Self::owned(values, shape)
            }
            Encoding::Elements(stored) => {
                let dtype = element_dtype(name, stored)?;
                match entry.ordered() {
                    Cow::Borrowed(bytes) if cast_bytes(bytes, dtype).is_some() => Self {
                        storage: Storage::Mapped(entry.map.clone(), entry.bytes.clone()),
                        dtype,
                        shape,
                    },
                    bytes => {
                        let mut copied = Buffer::on_host(dtype, len)?;
                        copied.view_mut(&[len])?.into_data().into_bytes().copy_from_slice(&bytes);
                        Self::owned(copied, shape)
                    }
                }
            }
        };
        // The only remaining reason to fail is the rank; after this check `view` cannot fail.
        let view = tensor.try_view().map(drop);
        view.map_err(|error| Error::new(OPERATOR, format!("{name}: {}", error.message())))?;
        Ok(tensor)
    }

    /// The tensor of all elements of `buffer`.
    fn owned(buffer: Buffer, shape: Vec<usize>) -> Self {
        Self { dtype: buffer.dtype(), storage: Storage::Owned(Arc::new(buffer)), shape }
    }

    /// The tensor as an operator argument.
    pub fn view(&self) -> View<'_> {
        self.try_view().expect("`new` has checked this view")
    }

    fn try_view(&self) -> Result<View<'_>> {
        match &self.storage {
            Storage::Mapped(map, bytes) => {
                let elements = cast_bytes(&map[bytes.clone()], self.dtype);
                View::new(elements.expect("`new` has checked the alignment"), &self.shape)
            }
            Storage::Owned(buffer) => buffer.view(&self.shape),
        }
    }

    /// Copies the weight to the memory of `backend`.
    pub(crate) fn upload<B: Backend>(&self, backend: &B) -> Result<Self> {
        let mut buffer = backend.allocate(self.dtype, self.len())?;
        copy(backend, self.view(), buffer.view_mut(&self.shape)?)?;
        Ok(Self::owned(buffer, self.shape.clone()))
    }

    /// The rows of matrices in device memory, or the elements of vectors, as one tensor. They have one dtype and as many columns.
    pub(crate) fn join<B: Backend>(parts: &[&Self], backend: &B) -> Result<Self> {
        let (dtype, columns) = (parts[0].dtype, &parts[0].shape[1..]);
        let row: usize = columns.iter().product();
        let rows: usize = parts.iter().map(|part| part.shape[0]).sum();
        let (mut buffer, mut at) = (backend.allocate(dtype, rows * row)?, 0);
        for part in parts {
            let strides = part.view().strides().to_vec();
            copy(backend, part.view(), buffer.strided_mut(at, &part.shape, &strides)?)?;
            at += part.shape[0] * row;
        }
        Ok(Self::owned(buffer, [&[rows], columns].concat()))
    }

    /// The size in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.len() * self.dtype.size()
    }

    /// Extents, in elements.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The type of the elements.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Whether the elements are borrowed from the file's map.
    pub fn is_mapped(&self) -> bool {
        matches!(self.storage, Storage::Mapped(..))
    }

    /// The weight in another dtype, rounded to nearest, ties to even; shares the storage if it already has that dtype.
    ///
    /// # Errors
    /// When memory is exhausted.
    pub fn cast(&self, dtype: Dtype) -> Result<Self> {
        if dtype == self.dtype {
            return Ok(self.clone());
        }
        Ok(Self::owned(self.convert(0..self.len(), dtype, |value| value)?, self.shape.clone()))
    }

    /// Rows `rows` of a matrix or elements of a vector, which must be on the host. Shares the storage of a mapped tensor.
    pub(crate) fn rows(&self, rows: Range<usize>) -> Result<Self> {
        let row: usize = self.shape[1..].iter().product();
        let elements = rows.start * row..rows.end * row;
        let shape = [&[rows.len()][..], &self.shape[1..]].concat();
        match &self.storage {
            Storage::Mapped(map, bytes) => {
                let [start, end] =
                    [elements.start, elements.end].map(|at| bytes.start + at * self.dtype.size());
                Ok(Self { storage: Storage::Mapped(map.clone(), start..end), dtype: self.dtype, shape })
            }
            Storage::Owned(_) => Ok(Self::owned(self.convert(elements, self.dtype, |value| value)?, shape)),
        }
    }

    /// The weight plus `offset`, in f32.
    pub(crate) fn plus(&self, offset: f32) -> Result<Self> {
        let sums = self.convert(0..self.len(), Dtype::F32, |value| value + offset)?;
        Ok(Self::owned(sums, self.shape.clone()))
    }

    fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Some elements after `change`, rounded to `dtype`. Converts through f32, which represents every element exactly.
    fn convert(&self, elements: Range<usize>, dtype: Dtype, change: impl Fn(f32) -> f32) -> Result<Buffer> {
        let mut converted = Buffer::on_host(dtype, elements.len())?;
        let (from, to) = (self.view(), converted.view_mut(&[elements.len()])?);
        with_dtype!(self.dtype, From => with_dtype!(dtype, To => {
            let from = from.as_slice::<From>().map_or(&[][..], |all| &all[elements]);
            let to = to.into_slice::<To>().into_iter().flatten();
            to.zip(from).for_each(|(to, from)| *to = To::from_f32(change(from.to_f32())));
        }));
        Ok(converted)
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{:?}", self.dtype, self.shape)
    }
}

/// The dtype of a tensor that is stored element by element.
pub(super) fn element_dtype(name: &str, stored: safetensors::Dtype) -> Result<Dtype> {
    match stored {
        safetensors::Dtype::F32 => Ok(Dtype::F32),
        safetensors::Dtype::F16 => Ok(Dtype::F16),
        safetensors::Dtype::BF16 => Ok(Dtype::Bf16),
        other => {
            let message = format!("{name} is stored as {other}, expected F32, F16 or BF16");
            Err(Error::new(OPERATOR, message))
        }
    }
}

/// The bytes as elements; `None` if misaligned. (An empty tensor is never misaligned.)
fn cast_bytes(bytes: &[u8], dtype: Dtype) -> Option<Data<'_>> {
    with_dtype!(dtype, T => bytemuck::try_cast_slice::<u8, T>(bytes).ok().map(Data::from))
}

/// How the elements of a tensor are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::model) enum Encoding {
    Elements(safetensors::Dtype),
    /// Blocks of integers with scales, whole blocks per row.
    Blocks(BlockType),
}

/// A tensor of a mapped file. Its byte range is inside the map, and its length matches encoding and shape.
#[derive(Debug, Clone)]
pub(in crate::model) struct TensorEntry {
    pub(in crate::model) map: Arc<Mmap>,
    pub(in crate::model) bytes: Range<usize>,
    pub(in crate::model) encoding: Encoding,
    pub(in crate::model) shape: Vec<usize>,
    /// For rows that the file stores in the order of interleaved RoPE: the number of heads, which divides the rows into even parts.
    pub(in crate::model) interleaved_heads: Option<usize>,
}

impl TensorEntry {
    /// The stored bytes, in the order of the file.
    pub(super) fn stored(&self) -> &[u8] {
        &self.map[self.bytes.clone()]
    }

    /// The bytes in row order.
    pub(super) fn ordered(&self) -> Cow<'_, [u8]> {
        match self.interleaved_heads {
            None => Cow::Borrowed(self.stored()),
            Some(_) => (0..self.num_rows()).flat_map(|row| self.row(row)).copied().collect::<Vec<_>>().into(),
        }
    }

    /// The bytes of row `row`.
    pub(super) fn row(&self, row: usize) -> &[u8] {
        let len = self.bytes.len() / self.num_rows();
        &self.stored()[self.stored_row(row) * len..][..len]
    }

    fn num_rows(&self) -> usize {
        self.shape.first().copied().unwrap_or(1)
    }

    /// The row of the file that holds row `row`: RoPE pairs elements `i` and `i + dim / 2` of a head, which such a file stores side by
    /// side.
    fn stored_row(&self, row: usize) -> usize {
        let Some(heads) = self.interleaved_heads else { return row };
        let dim = self.num_rows() / heads;
        let (head, at) = (row / dim, row % dim);
        head * dim + at % (dim / 2) * 2 + at / (dim / 2)
    }
}
