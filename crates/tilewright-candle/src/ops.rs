//! The operations that candle calls with the storage of its tensors.

use crate::{Engine, OPERATOR, Step, tensor};
use candle_core::{CpuStorage, CustomOp2, Error, InplaceOp3, Layout, Result, Shape};
use std::sync::PoisonError;
use tilewright::{
    Attention, Backend, KvCache, KvCacheMut, Output, Scale, View, ViewMut,
    kv::{
        ScaleMut,
        append::{NewKv, QuantizedCacheMut, append_planned},
    },
};

/// Arguments: q and a cache.
pub(crate) struct Attend<'a>(pub(crate) &'a Step<'a>);

/// Arguments: a cache, new keys and new values.
pub(crate) struct Append<'a>(pub(crate) &'a Step<'a>);

impl Step<'_> {
    pub(crate) fn attend_on<B: Backend>(
        &self,
        attention: &Attention<B>,
        q: View<'_>,
        [k, v]: [View<'_>; 2],
        o: ViewMut<'_>,
    ) -> tilewright::Result<()> {
        let workspace = &mut *self.workspace.lock().unwrap_or_else(PoisonError::into_inner);
        attention.run(&self.plan, q, KvCache { k, v }, Output { o, lse: None, workspace })
    }

    pub(crate) fn append_on<B: Backend>(
        &self,
        backend: &B,
        [k, v]: [View<'_>; 2],
        [cache_k, cache_v]: [ViewMut<'_>; 2],
    ) -> tilewright::Result<()> {
        let (k_scale, v_scale) = (ScaleMut::Static(Scale::One), ScaleMut::Static(Scale::One));
        let cache = QuantizedCacheMut { cache: KvCacheMut { k: cache_k, v: cache_v }, k_scale, v_scale };
        append_planned(backend, &self.slots, NewKv { k, v }, cache, self.attention.problem().layout())
    }
}

impl CustomOp2 for Attend<'_> {
    fn name(&self) -> &'static str {
        OPERATOR
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        lq: &Layout,
        kv: &CpuStorage,
        lkv: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        #[allow(irrefutable_let_patterns, reason = "the other backends are features")]
        let Engine::Cpu(attention, _) = &self.0.attention.engine else { return Err(other_device("the CPU")) };
        let run = || -> tilewright::Result<_> {
            let (q, [k, v]) = (tensor::view("q", q, lq)?, tensor::halves(lkv)?);
            let kv = [tensor::view("cache", kv, &k)?, tensor::view("cache", kv, &v)?];
            let (dims, len) = (lq.dims(), lq.shape().elem_count());
            macro_rules! output {
                ($Storage:ident, $zero:expr) => {{
                    let mut o = vec![$zero; len];
                    self.0.attend_on(attention, q, kv, ViewMut::new(&mut o, dims)?)?;
                    Ok(CpuStorage::$Storage(o))
                }};
            }
            match q.dtype() {
                tilewright::Dtype::F16 => output!(F16, Default::default()),
                tilewright::Dtype::Bf16 => output!(BF16, Default::default()),
                _ => output!(F32, 0.0),
            }
        };
        run().map(|o| (o, lq.shape().clone())).map_err(Error::wrap)
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        q: &candle_core::CudaStorage,
        lq: &Layout,
        kv: &candle_core::CudaStorage,
        lkv: &Layout,
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        let Engine::Cuda(cuda) = &self.0.attention.engine else { return Err(other_device("a GPU")) };
        Ok((cuda.attend(self.0, (q, lq), (kv, lkv))?, lq.shape().clone()))
    }
}

impl InplaceOp3 for Append<'_> {
    fn name(&self) -> &'static str {
        "candle.append"
    }

    fn cpu_fwd(
        &self,
        cache: &mut CpuStorage,
        lcache: &Layout,
        k: &CpuStorage,
        lk: &Layout,
        v: &CpuStorage,
        lv: &Layout,
    ) -> Result<()> {
        #[allow(irrefutable_let_patterns, reason = "the other backends are features")]
        let Engine::Cpu(_, cpu) = &self.0.attention.engine else { return Err(other_device("the CPU")) };
        let mut run = || -> tilewright::Result<_> {
            let new = [tensor::view("k", k, lk)?, tensor::view("v", v, lv)?];
            self.0.append_on(cpu, new, tensor::halves_mut(cache, &tensor::halves(lcache)?)?)
        };
        run().map_err(Error::wrap)
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        cache: &mut candle_core::CudaStorage,
        lcache: &Layout,
        k: &candle_core::CudaStorage,
        lk: &Layout,
        v: &candle_core::CudaStorage,
        lv: &Layout,
    ) -> Result<()> {
        let Engine::Cuda(cuda) = &self.0.attention.engine else { return Err(other_device("a GPU")) };
        cuda.append(self.0, cache, lcache, [(k, lk), (v, lv)])
    }
}

fn other_device(here: &str) -> Error {
    crate::invalid(format!("the tensors are on {here}, expected the device of PagedAttention"))
}
