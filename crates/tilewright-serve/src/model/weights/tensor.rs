//! One weight: read-only elements, in the file's map wherever they are aligned for their type.
//!
//! Row-major. A tensor keeps the map alive that it looks into, so it may outlive the [`super::Weights`] it came
//! from.

use super::{OPERATOR, shard::Record};
use half::{bf16, f16};
use memmap2::Mmap;
use std::{fmt, ops::Range, sync::Arc};
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
    /// Aligned for the dtype, which [`Tensor::new`] has checked.
    Mapped(Arc<Mmap>, Range<usize>),
    F32(Arc<[f32]>),
    F16(Arc<[f16]>),
    Bf16(Arc<[bf16]>),
    E4m3(Arc<[E4m3]>),
    E5m2(Arc<[E5m2]>),
    I8(Arc<[i8]>),
    /// In the memory of a device.
    Placed(Arc<Buffer>),
}

impl Tensor {
    /// The tensor at `record`, copied only where the file puts it at an address that its type cannot have.
    pub(super) fn new(name: &str, record: &Record) -> Result<Self> {
        let dtype = match record.dtype {
            safetensors::Dtype::F32 => Dtype::F32,
            safetensors::Dtype::F16 => Dtype::F16,
            safetensors::Dtype::BF16 => Dtype::Bf16,
            other => {
                let message = format!("{name} is stored as {other}, expected F32, F16 or BF16");
                return Err(Error::new(OPERATOR, message));
            }
        };
        let bytes = &record.map[record.bytes.clone()];
        let storage = if mapped(bytes, dtype).is_some() {
            Storage::Mapped(record.map.clone(), record.bytes.clone())
        } else {
            copied(bytes, dtype)
        };
        let tensor = Self { storage, dtype, shape: record.shape.clone() };
        // The only thing left that a view can refuse is the rank; then `view` cannot fail.
        View::new(tensor.data(), &tensor.shape)
            .map_err(|error| Error::new(OPERATOR, format!("{name}: {}", error.message())))?;
        Ok(tensor)
    }

    /// The whole tensor as an argument for an operator.
    pub fn view(&self) -> View<'_> {
        let view = match &self.storage {
            Storage::Placed(buffer) => buffer.view(&self.shape),
            _ => View::new(self.data(), &self.shape),
        };
        view.expect("`new` has made this view before")
    }

    /// The same weight in memory of `backend`.
    pub(crate) fn on<B: Backend>(&self, backend: &B) -> Result<Self> {
        let mut there = backend.allocate(self.dtype, self.shape.iter().product())?;
        copy(backend, self.view(), there.view_mut(&self.shape)?)?;
        Ok(Self { storage: Storage::Placed(Arc::new(there)), dtype: self.dtype, shape: self.shape.clone() })
    }

    /// Its size.
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

    /// Whether the elements are those of the file, not a copy.
    pub fn is_mapped(&self) -> bool {
        matches!(self.storage, Storage::Mapped(..))
    }

    /// The same weight in another dtype, each element rounded to the nearest, ties to even; no copy is made when
    /// it has that dtype already. Through f32, which holds every f16 and bf16 exactly.
    pub fn cast(&self, dtype: Dtype) -> Self {
        if dtype == self.dtype {
            return self.clone();
        }
        let data = self.data();
        let storage = match dtype {
            Dtype::F32 => Storage::F32(rounded(data)),
            Dtype::F16 => Storage::F16(rounded(data)),
            Dtype::Bf16 => Storage::Bf16(rounded(data)),
            Dtype::E4m3 => Storage::E4m3(rounded(data)),
            Dtype::E5m2 => Storage::E5m2(rounded(data)),
            Dtype::I8 => Storage::I8(rounded(data)),
        };
        Self { storage, dtype, shape: self.shape.clone() }
    }

    fn data(&self) -> Data<'_> {
        match &self.storage {
            Storage::Mapped(map, bytes) => {
                mapped(&map[bytes.clone()], self.dtype).expect("`new` has checked the alignment")
            }
            Storage::F32(values) => Data::F32(values),
            Storage::F16(values) => Data::F16(values),
            Storage::Bf16(values) => Data::Bf16(values),
            Storage::E4m3(values) => Data::E4m3(values),
            Storage::E5m2(values) => Data::E5m2(values),
            Storage::I8(values) => Data::I8(values),
            Storage::Placed(_) => self.view().data(),
        }
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{:?}", self.dtype, self.shape)
    }
}

/// The bytes as elements, if they are aligned for them. (An empty tensor may lie anywhere.)
fn mapped(bytes: &[u8], dtype: Dtype) -> Option<Data<'_>> {
    match dtype {
        Dtype::F32 => bytemuck::try_cast_slice(bytes).ok().map(Data::F32),
        Dtype::F16 => bytemuck::try_cast_slice(bytes).ok().map(Data::F16),
        Dtype::Bf16 => bytemuck::try_cast_slice(bytes).ok().map(Data::Bf16),
        Dtype::E4m3 => bytemuck::try_cast_slice(bytes).ok().map(Data::E4m3),
        Dtype::E5m2 => bytemuck::try_cast_slice(bytes).ok().map(Data::E5m2),
        Dtype::I8 => bytemuck::try_cast_slice(bytes).ok().map(Data::I8),
    }
}

fn copied(bytes: &[u8], dtype: Dtype) -> Storage {
    match dtype {
        Dtype::F32 => Storage::F32(bytemuck::pod_collect_to_vec(bytes).into()),
        Dtype::F16 => Storage::F16(bytemuck::pod_collect_to_vec(bytes).into()),
        Dtype::Bf16 => Storage::Bf16(bytemuck::pod_collect_to_vec(bytes).into()),
        Dtype::E4m3 => Storage::E4m3(bytemuck::pod_collect_to_vec(bytes).into()),
        Dtype::E5m2 => Storage::E5m2(bytemuck::pod_collect_to_vec(bytes).into()),
        Dtype::I8 => Storage::I8(bytemuck::pod_collect_to_vec(bytes).into()),
    }
}

fn rounded<T: Element>(data: Data<'_>) -> Arc<[T]> {
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
