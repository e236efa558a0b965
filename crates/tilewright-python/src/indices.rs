//! Integer tensors where they are: on the host or in device memory.

use crate::{dtype::TensorDtype, tensor::TensorArg};
use bytemuck::Pod;
use tilewright::{
    Error, Result,
    tensor::{IndicesMut, Integers},
};

/// Integers of the engine, with the dtypes of tensors that hold them.
pub(crate) trait IntegerType: Pod {
    const DTYPES: &[TensorDtype];
    const EXPECTED: &str;
}

impl IntegerType for i32 {
    const DTYPES: &[TensorDtype] = &[TensorDtype::I32];
    const EXPECTED: &str = "int32";
}

impl IntegerType for i64 {
    const DTYPES: &[TensorDtype] = &[TensorDtype::I64];
    const EXPECTED: &str = "int64";
}

impl IntegerType for u64 {
    const DTYPES: &[TensorDtype] = &[TensorDtype::I64, TensorDtype::U64];
    const EXPECTED: &str = "int64 or uint64";
}

impl TensorArg {
    /// The elements of a contiguous tensor of one axis.
    pub(crate) fn integers<T: IntegerType>(
        &self,
        operator: &'static str,
        name: &str,
    ) -> Result<Integers<'_, T>> {
        self.check_contiguous::<T>(operator, name)?;
        let axes = self.shape().len();
        tilewright::ensure!(axes == 1, operator, "{name} has shape {:?}, expected one axis", self.shape());
        if let Some(memory) = self.device_memory() {
            return memory.integers(0, self.len());
        }
        let bytes = self.bytes();
        if bytes.is_empty() {
            return Ok((&[]).into()); // an empty slice of bytes is not aligned
        }
        let values: &[T] =
            bytemuck::try_cast_slice(bytes).map_err(|why| Error::new(operator, format!("{name}: {why}")))?;
        Ok(values.into())
    }

    /// The elements of a contiguous writable tensor of any number of axes.
    pub(crate) fn indices_mut(&mut self, operator: &'static str, name: &str) -> Result<IndicesMut<'_>> {
        self.check_contiguous::<i32>(operator, name)?;
        self.check_writable(operator, name)?;
        let len = self.len();
        if !self.on_host() {
            return self.memory_mut().indices_mut(0, len);
        }
        let bytes = self.bytes_mut();
        if bytes.is_empty() {
            return Ok((&mut [][..]).into());
        }
        let values: &mut [i32] = bytemuck::try_cast_slice_mut(bytes)
            .map_err(|why| Error::new(operator, format!("{name}: {why}")))?;
        Ok(values.into())
    }

    /// The elements of a contiguous tensor of int32 on the host, of any number of axes.
    pub(crate) fn host_integers(&self, operator: &'static str, name: &str) -> Result<&[i32]> {
        self.check_contiguous::<i32>(operator, name)?;
        let bytes = self.dense_host(operator, name)?;
        if bytes.is_empty() {
            return Ok(&[]); // an empty slice of bytes is not aligned
        }
        bytemuck::try_cast_slice(bytes).map_err(|why| Error::new(operator, format!("{name}: {why}")))
    }

    /// The elements of a contiguous writable tensor of int32 on the host, of any number of axes.
    pub(crate) fn host_integers_mut(&mut self, operator: &'static str, name: &str) -> Result<&mut [i32]> {
        self.host_integers(operator, name)?;
        self.check_writable(operator, name)?;
        let bytes = self.bytes_mut();
        if bytes.is_empty() {
            return Ok(&mut []);
        }
        bytemuck::try_cast_slice_mut(bytes).map_err(|why| Error::new(operator, format!("{name}: {why}")))
    }

    fn check_contiguous<T: IntegerType>(&self, operator: &'static str, name: &str) -> Result<()> {
        let is_contiguous = self.span().end - self.span().start == (size_of::<T>() * self.len()) as u64;
        tilewright::ensure!(
            T::DTYPES.contains(&self.dtype()) && is_contiguous,
            operator,
            "{name} is {} with strides {:?}, expected contiguous {}",
            self.dtype(),
            self.strides(),
            T::EXPECTED
        );
        Ok(())
    }
}
