//! One weight: read-only, row-major elements, borrowed from the file's map if they are aligned for their type.
//!
//! A tensor keeps its map alive, so it may outlive the [`super::Weights`] it came from.

use super::{
    OPERATOR,
    entry::{Encoding, TensorEntry},
};
use half::{bf16, f16};
use memmap2::Mmap;
use std::{borrow::Cow, fmt, ops::Range, sync::Arc};
use tilewright::{
    Backend, Dtype, E4m3, E5m2, Element, Error, Result, View,
    tensor::{Buffer, Data, copy},
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
    F32(Arc<[f32]>),
    F16(Arc<[f16]>),
    Bf16(Arc<[bf16]>),
    E4m3(Arc<[E4m3]>),
    E5m2(Arc<[E5m2]>),
    I8(Arc<[i8]>),
    /// In device memory.
    Device(Arc<Buffer>),
}

impl Tensor {
    /// The tensor of `entry`: borrowed if it is aligned and in row order, dequantized to f32 if it has blocks, else copied.
    pub(super) fn new(name: &str, entry: &TensorEntry) -> Result<Self> {
        let shape = entry.shape.clone();
        let tensor = match entry.encoding {
            Encoding::Blocks(kind) => {
                let values = kind.dequantize(&entry.ordered()).collect();
                Self { storage: Storage::F32(values), dtype: Dtype::F32, shape }
            }
            Encoding::Elements(stored) => {
                let dtype = element_dtype(name, stored)?;
                let storage = match entry.ordered() {
                    Cow::Borrowed(bytes) if cast_bytes(bytes, dtype).is_some() => {
                        Storage::Mapped(entry.map.clone(), entry.bytes.clone())
                    }
                    bytes => copy_bytes(&bytes, dtype),
                };
                Self { storage, dtype, shape }
            }
        };
        // The only remaining reason to fail is the rank; after this check `view` cannot fail.
        View::new(tensor.data(), &tensor.shape)
            .map_err(|error| Error::new(OPERATOR, format!("{name}: {}", error.message())))?;
        Ok(tensor)
    }

    /// The tensor as an operator argument.
    pub fn view(&self) -> View<'_> {
        let view = match &self.storage {
            Storage::Device(buffer) => buffer.view(&self.shape),
            _ => View::new(self.data(), &self.shape),
        };
        view.expect("`new` has checked this view")
    }

    /// Copies the weight to the memory of `backend`.
    pub(crate) fn upload<B: Backend>(&self, backend: &B) -> Result<Self> {
        let mut buffer = backend.allocate(self.dtype, self.shape.iter().product())?;
        copy(backend, self.view(), buffer.view_mut(&self.shape)?)?;
        Ok(Self { storage: Storage::Device(Arc::new(buffer)), dtype: self.dtype, shape: self.shape.clone() })
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
        let shape = [&[rows], columns].concat();
        Ok(Self { storage: Storage::Device(Arc::new(buffer)), dtype, shape })
    }

    /// The size in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.size()
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
    /// Converts through f32, which represents every f16 and bf16 exactly.
    pub fn cast(&self, dtype: Dtype) -> Self {
        if dtype == self.dtype {
            return self.clone();
        }
        let data = self.data();
        let storage = match dtype {
            Dtype::F32 => Storage::F32(convert(data)),
            Dtype::F16 => Storage::F16(convert(data)),
            Dtype::Bf16 => Storage::Bf16(convert(data)),
            Dtype::E4m3 => Storage::E4m3(convert(data)),
            Dtype::E5m2 => Storage::E5m2(convert(data)),
            Dtype::I8 => Storage::I8(convert(data)),
        };
        Self { storage, dtype, shape: self.shape.clone() }
    }

    /// Rows `rows` of a matrix or elements of a vector, which must be on the host. Shares the storage of a mapped tensor.
    pub(crate) fn rows(&self, rows: Range<usize>) -> Self {
        let row: usize = self.shape[1..].iter().product();
        let elements = rows.start * row..rows.end * row;
        let storage = match &self.storage {
            Storage::Mapped(map, bytes) => {
                let (start, size) = (bytes.start, self.dtype.size());
                Storage::Mapped(map.clone(), start + elements.start * size..start + elements.end * size)
            }
            Storage::F32(values) => Storage::F32(values[elements].into()),
            Storage::F16(values) => Storage::F16(values[elements].into()),
            Storage::Bf16(values) => Storage::Bf16(values[elements].into()),
            Storage::E4m3(values) => Storage::E4m3(values[elements].into()),
            Storage::E5m2(values) => Storage::E5m2(values[elements].into()),
            Storage::I8(values) => Storage::I8(values[elements].into()),
            Storage::Device(_) => unreachable!("weights are split before they are uploaded"),
        };
        let shape = [&[rows.len()][..], &self.shape[1..]].concat();
        Self { storage, dtype: self.dtype, shape }
    }

    /// The weight plus `offset`, in f32.
    pub(crate) fn plus(&self, offset: f32) -> Self {
        let values: Arc<[f32]> = convert(self.data());
        let values = values.iter().map(|value| value + offset).collect();
        Self { storage: Storage::F32(values), dtype: Dtype::F32, shape: self.shape.clone() }
    }

    fn data(&self) -> Data<'_> {
        match &self.storage {
            Storage::Mapped(map, bytes) => {
                cast_bytes(&map[bytes.clone()], self.dtype).expect("`new` has checked the alignment")
            }
            Storage::F32(values) => Data::F32(values),
            Storage::F16(values) => Data::F16(values),
            Storage::Bf16(values) => Data::Bf16(values),
            Storage::E4m3(values) => Data::E4m3(values),
            Storage::E5m2(values) => Data::E5m2(values),
            Storage::I8(values) => Data::I8(values),
            Storage::Device(_) => self.view().data(),
        }
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
    match dtype {
        Dtype::F32 => bytemuck::try_cast_slice(bytes).ok().map(Data::F32),
        Dtype::F16 => bytemuck::try_cast_slice(bytes).ok().map(Data::F16),
        Dtype::Bf16 => bytemuck::try_cast_slice(bytes).ok().map(Data::Bf16),
        Dtype::E4m3 => bytemuck::try_cast_slice(bytes).ok().map(Data::E4m3),
        Dtype::E5m2 => bytemuck::try_cast_slice(bytes).ok().map(Data::E5m2),
        Dtype::I8 => bytemuck::try_cast_slice(bytes).ok().map(Data::I8),
    }
}

fn copy_bytes(bytes: &[u8], dtype: Dtype) -> Storage {
    match dtype {
        Dtype::F32 => Storage::F32(bytemuck::pod_collect_to_vec(bytes).into()),
        Dtype::F16 => Storage::F16(bytemuck::pod_collect_to_vec(bytes).into()),
        Dtype::Bf16 => Storage::Bf16(bytemuck::pod_collect_to_vec(bytes).into()),
        Dtype::E4m3 => Storage::E4m3(bytemuck::pod_collect_to_vec(bytes).into()),
        Dtype::E5m2 => Storage::E5m2(bytemuck::pod_collect_to_vec(bytes).into()),
        Dtype::I8 => Storage::I8(bytemuck::pod_collect_to_vec(bytes).into()),
    }
}

fn convert<T: Element>(data: Data<'_>) -> Arc<[T]> {
    fn each<S: Element, T: Element>(values: &[S]) -> Arc<[T]> {
        values.iter().map(|value| T::from_f32(value.to_f32())).collect()
    }
    match data {
        Data::F32(values) => each(values),
        Data::F16(values) => each(values),
        Data::Bf16(values) => each(values),
        Data::E4m3(values) => each(values),
        Data::E5m2(values) => each(values),
        Data::I8(values) => each(values),
    }
}
