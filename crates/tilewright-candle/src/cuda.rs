//! Attention on candle's CUDA tensors, on candle's stream.

use crate::{Step, tensor};
use bytemuck::Pod;
use candle_core::{
    CudaDevice, CudaStorage, Error, Layout, Result,
    backend::BackendStorage as _,
    cuda::CudaDType,
    cuda::cudarc::driver::{DeviceRepr, ValidAsZeroBits},
};
use half::{bf16, f16};
use tilewright::{Attention, Dtype, Problem, View, tensor::DeviceMemory};
use tilewright_cuda::{Cuda, CudarcSlice, Device, Gpu, Stream};

/// The operator on the GPU of a candle device.
#[derive(Debug)]
pub(crate) struct CudaAttention {
    pub(crate) attention: Attention<Cuda>,
    pub(crate) gpu: Cuda,
    stream: Stream,
    device: CudaDevice,
}

/// Storage and layout of a tensor.
type Argument<'a> = (&'a CudaStorage, &'a Layout);

impl CudaAttention {
    pub(crate) fn new(problem: Problem, device: &CudaDevice) -> Result<Self> {
        let stream = Stream::from_cudarc(device.cuda_stream()).map_err(Error::wrap)?;
        let gpu = Gpu::new(Device::on_stream(stream.clone()).map_err(Error::wrap)?);
        let attention = Attention::new(problem, gpu.clone()).map_err(Error::wrap)?;
        Ok(Self { attention, gpu, stream, device: device.clone() })
    }

    pub(crate) fn attend(
        &self,
        step: &Step<'_>,
        q: Argument<'_>,
        cache: Argument<'_>,
    ) -> Result<CudaStorage> {
        match dtype(q.0)? {
            Dtype::F16 => self.attend_as::<f16>(step, q, cache),
            Dtype::Bf16 => self.attend_as::<bf16>(step, q, cache),
            _ => self.attend_as::<f32>(step, q, cache),
        }
    }

    fn attend_as<T>(&self, step: &Step<'_>, q: Argument<'_>, kv: Argument<'_>) -> Result<CudaStorage>
    where
        T: CudaDType + DeviceRepr + ValidAsZeroBits + Pod,
    {
        let ((q, lq), (kv, lkv)) = (q, kv);
        let mut o = self.device.alloc_zeros::<T>(lq.shape().elem_count())?;
        {
            let mut out = self.stream.slice_mut(&mut o).map_err(Error::wrap)?;
            let (q_dtype, kv_dtype) = (dtype(q)?, dtype(kv)?);
            let (q, kv) = (self.slice(q)?, self.slice(kv)?);
            let mut run = || {
                let [k, v] = tensor::halves(lkv)?;
                let kv = [view("cache", &kv, kv_dtype, &k)?, view("cache", &kv, kv_dtype, &v)?];
                let o = out.view_mut(q_dtype, 0, lq.dims())?;
                step.attend_on(&self.attention, view("q", &q, q_dtype, lq)?, kv, o)
            };
            run().map_err(Error::wrap)?;
        }
        Ok(CudaStorage::wrap_cuda_slice(o, self.device.clone()))
    }

    pub(crate) fn append(
        &self,
        step: &Step<'_>,
        cache: &mut CudaStorage,
        lcache: &Layout,
        new: [Argument<'_>; 2],
    ) -> Result<()> {
        match dtype(cache)? {
            Dtype::F16 => self.append_as::<f16>(step, cache, lcache, new),
            Dtype::Bf16 => self.append_as::<bf16>(step, cache, lcache, new),
            _ => self.append_as::<f32>(step, cache, lcache, new),
        }
    }

    fn append_as<T: CudaDType + DeviceRepr + Pod>(
        &self,
        step: &Step<'_>,
        cache: &mut CudaStorage,
        lcache: &Layout,
        [(k, lk), (v, lv)]: [Argument<'_>; 2],
    ) -> Result<()> {
        let (cache_dtype, k_dtype, v_dtype) = (dtype(cache)?, dtype(k)?, dtype(v)?);
        let (k, v) = (self.slice(k)?, self.slice(v)?);
        let [low, high] = tensor::halves(lcache).map_err(Error::wrap)?;
        let both = cache.as_cuda_slice_mut::<T>()?.try_split_at_mut(high.start_offset());
        let (mut keys, mut values) = both.ok_or_else(|| Error::wrap(tensor::out_of_bounds()))?;
        let mut keys = self.stream.slice_mut(&mut keys).map_err(Error::wrap)?;
        let mut values = self.stream.slice_mut(&mut values).map_err(Error::wrap)?;
        let mut run = || {
            let offset = low.start_offset() * cache_dtype.size();
            let keys = keys.strided_mut(cache_dtype, offset, low.dims(), low.stride())?;
            let values = values.strided_mut(cache_dtype, 0, high.dims(), high.stride())?;
            let new = [view("k", &k, k_dtype, lk)?, view("v", &v, v_dtype, lv)?];
            step.append_on(&self.gpu, new, [keys, values])
        };
        run().map_err(Error::wrap)
    }

    /// The whole storage, read by later work of the stream.
    fn slice<'a>(&'a self, storage: &'a CudaStorage) -> Result<CudarcSlice<'a>> {
        match dtype(storage)? {
            Dtype::F16 => self.stream.slice(storage.as_cuda_slice::<f16>()?),
            Dtype::Bf16 => self.stream.slice(storage.as_cuda_slice::<bf16>()?),
            _ => self.stream.slice(storage.as_cuda_slice::<f32>()?),
        }
        .map_err(Error::wrap)
    }
}

fn view<'a>(
    name: &str,
    memory: &'a DeviceMemory,
    dtype: Dtype,
    layout: &Layout,
) -> tilewright::Result<View<'a>> {
    let offset = layout.start_offset() * dtype.size();
    memory.strided(dtype, offset, layout.dims(), layout.stride()).map_err(|error| tensor::named(name, &error))
}

/// The dtype of a tensor that operators take.
fn dtype(storage: &CudaStorage) -> Result<Dtype> {
    match storage.dtype() {
        candle_core::DType::F32 => Ok(Dtype::F32),
        candle_core::DType::F16 => Ok(Dtype::F16),
        candle_core::DType::BF16 => Ok(Dtype::Bf16),
        other => Err(Error::wrap(tensor::unsupported(other))),
    }
}
