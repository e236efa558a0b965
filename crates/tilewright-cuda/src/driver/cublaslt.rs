//! cuBLASLt, where the loader finds it: products of 16-bit elements with more rows than our own kernels are made for.
//!
//! Found and loaded at run time, the first time that it may be of use; nothing links it. Where it is missing, or has no algorithm for a
//! product, nothing is done, and the caller is told so.
//!
//! Its matrices are columns behind each other, ours rows: `out = x · weightᵀ` is to it `outᵀ = weight · xᵀ`.

use super::{
    Error, ErrorKind, Memory, Result, Stream,
    handle::{Handle, lock},
};
use cudarc::cublaslt::{
    result::{self, CublasError},
    sys,
};
use std::{
    collections::{HashMap, hash_map::Entry},
    ffi::c_void,
    sync::{Arc, Mutex, OnceLock},
};
use tilewright::Dtype;
use tilewright_kernels::gemm::GemmParams;

/// Bytes that algorithms may use for themselves: what NVIDIA recommends for Hopper.
const WORKSPACE: usize = 32 << 20;
/// Rows beyond which the library is asked.
const FEW: u32 = 16;
/// `CUBLAS_OP_T` of cublas_api.h.
const TRANSPOSE: i32 = 1;
/// Algorithms that are kept; prompts have all lengths.
const MOST: usize = 1024;

/// What a machine's stream knows of the library. Clones share it.
#[derive(Debug, Clone)]
pub(crate) struct Products {
    stream: Stream,
    /// The library, or why there is none; unset until somebody asked.
    library: Arc<OnceLock<std::result::Result<Library, String>>>,
}

/// The library on a stream.
#[derive(Debug)]
struct Library {
    handle: Handle<sys::cublasLtContext>,
    /// 120803 is 12.8.3.
    version: usize,
    workspace: Memory,
    /// Algorithms found; none where there is none.
    plans: Mutex<HashMap<Key, Option<Plan>>>,
}

/// What an algorithm is chosen by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    shape: [u32; 3],
    /// Of x, the weight and the result.
    strides: [u64; 3],
    /// Of both sides, and of the result.
    dtypes: [Dtype; 2],
    bias: bool,
}

/// An algorithm with what describes its matrices.
#[derive(Debug)]
struct Plan {
    product: Handle<sys::cublasLtMatmulDescOpaque_t>,
    /// Of the weight, x and the result.
    layouts: [Handle<sys::cublasLtMatrixLayoutOpaque_t>; 3],
    algorithm: sys::cublasLtMatmulAlgo_t,
}

/// A refusal of the library, with the name of the call.
fn refused(call: &str) -> impl Fn(CublasError) -> Error + '_ {
    move |why| Error::of(ErrorKind::Driver, call, why.to_string())
}

impl Products {
    /// The library is looked for when it is needed.
    pub(crate) fn new(stream: &Stream) -> Self {
        Self { stream: stream.clone(), library: Arc::default() }
    }

    /// What is known of it so far, for a person to read.
    pub(crate) fn describe(&self) -> String {
        match self.library.get() {
            None => "cuBLASLt not asked for yet".to_owned(),
            Some(Ok(library)) => {
                let version = library.version;
                format!("cuBLASLt {}.{} for products of many rows", version / 10_000, version / 100 % 100)
            }
            Some(Err(why)) => format!("own kernels for all products: {why}"),
        }
    }

    /// Has the library compute `product`, behind all work that the stream was given; false where it cannot, and nothing was done.
    ///
    /// # Errors
    /// When the library or the driver fails.
    pub(crate) fn multiply(&self, product: &GemmParams) -> Result<bool> {
        let Some(key) = Key::of(product) else { return Ok(false) };
        let _current = self.stream.context().enter()?;
        // what opening it allocates must not become part of a graph
        if self.library.get().is_none() && self.stream.is_captured()? {
            return Ok(false);
        }
        match self.library.get_or_init(|| Library::open(&self.stream)) {
            Ok(library) => library.multiply(&self.stream, key, product),
            Err(_) => Ok(false),
        }
    }
}

impl Key {
    /// That of a product that the library may be asked for.
    fn of(product: &GemmParams) -> Option<Self> {
        let [rows, features, inputs] = product.shape;
        let (x, weight, out) = (product.x, product.weight, product.out);
        let elements = x.dtype == weight.dtype && x.dtype.size() == 2;
        let results = out.dtype == x.dtype || out.dtype == Dtype::F32;
        let bias = product.bias.is_none_or(|(dtype, at)| dtype == out.dtype && at.is_multiple_of(16));
        let aligned = [x, weight, out].iter().all(|matrix| {
            let bytes = matrix.stride.saturating_mul(matrix.dtype.size() as u64);
            matrix.address.is_multiple_of(16) && bytes.is_multiple_of(16)
        });
        let apart = x.stride >= u64::from(inputs)
            && weight.stride >= u64::from(inputs)
            && out.stride >= u64::from(features);
        let fits = rows > FEW && inputs > 0 && product.groups.is_none();
        (elements && results && bias && aligned && apart && fits).then_some(Self {
            shape: product.shape,
            strides: [x.stride, weight.stride, out.stride],
            dtypes: [x.dtype, out.dtype],
            bias: product.bias.is_some(),
        })
    }
}

impl Library {
    /// Opens the library; the stream's context is current.
    fn open(stream: &Stream) -> std::result::Result<Self, String> {
        // SAFETY: asks the loader for a library, whose initialisers are its own.
        if !unsafe { sys::is_culib_present() } {
            return Err("the loader finds no cuBLASLt".to_owned());
        }
        let workspace = stream.allocate(WORKSPACE).map_err(|why| why.to_string())?;
        let handle = result::create_handle().map_err(|why| format!("cublasLtCreate: {why}"))?;
        // SAFETY: asks for a number.
        let version = unsafe { sys::cublasLtGetVersion() };
        Ok(Self { handle: Handle(handle), version, workspace, plans: Mutex::default() })
    }

    fn multiply(&self, stream: &Stream, key: Key, product: &GemmParams) -> Result<bool> {
        let mut plans = lock(&self.plans);
        if plans.len() >= MOST && !plans.contains_key(&key) {
            plans.clear();
        }
        let plan = match plans.entry(key) {
            Entry::Occupied(found) => found.into_mut(),
            Entry::Vacant(place) => place.insert(Plan::find(self.handle, key)?),
        };
        let Some(plan) = plan else { return Ok(false) };
        if let Some((_, bias)) = product.bias {
            plan.set(sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias)?;
        }
        let (one, zero) = (1.0_f32, 0.0_f32);
        let [weight, x, out] = plan.layouts.map(|layout| layout.0);
        let address = |address: u64| address as *const c_void;
        // SAFETY: descriptions live as long as the plan, which is locked; the scalars are f32, as the description says; addresses
        // are the caller's to vouch for, as in every launch; the workspace lives as long as the library, and is used in the order
        // of one stream.
        unsafe {
            result::matmul(
                self.handle.0,
                plan.product.0,
                (&raw const one).cast(),
                (&raw const zero).cast(),
                address(product.weight.address),
                weight,
                address(product.x.address),
                x,
                address(product.out.address),
                out,
                product.out.address as *mut c_void,
                out,
                &raw const plan.algorithm,
                self.workspace.address() as *mut c_void,
                WORKSPACE,
                stream.raw().cast(),
            )
        }
        .map_err(refused("cublasLtMatmul"))?;
        Ok(true)
    }
}

impl Drop for Library {
    fn drop(&mut self) {
        // SAFETY: created by `open`, and nobody else has it. An error here has nobody to tell.
        let _ = unsafe { result::destroy_handle(self.handle.0) };
    }
}

fn element(dtype: Dtype) -> sys::cudaDataType {
    match dtype {
        Dtype::F16 => sys::cudaDataType::CUDA_R_16F,
        Dtype::Bf16 => sys::cudaDataType::CUDA_R_16BF,
        _ => sys::cudaDataType::CUDA_R_32F,
    }
}

impl Plan {
    /// The algorithm that the library thinks the fastest; none where it has none.
    fn find(handle: Handle<sys::cublasLtContext>, key: Key) -> Result<Option<Self>> {
        let mut plan = Self::described(key)?;
        let preference = result::create_matmul_pref().map_err(refused("cublasLtMatmulPreferenceCreate"))?;
        let asked = prefer(preference).and_then(|()| {
            let [weight, x, out] = plan.layouts.map(|layout| layout.0);
            // SAFETY: all of them were created above, and are destroyed below or with the plan.
            unsafe {
                result::get_matmul_algo_heuristic(handle.0, plan.product.0, weight, x, out, out, preference)
            }
        });
        // SAFETY: created above, and not used any more. An error here has nobody to tell.
        let _ = unsafe { result::destroy_matmul_pref(preference) };
        match asked {
            Ok(found) => {
                plan.algorithm = found.algo;
                Ok(Some(plan))
            }
            Err(CublasError(sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED)) => Ok(None),
            Err(why) => Err(refused("cublasLtMatmulAlgoGetHeuristic")(why)),
        }
    }

    /// The matrices of a product, without an algorithm.
    fn described(key: Key) -> Result<Self> {
        use sys::cublasLtMatmulDescAttributes_t::{
            CUBLASLT_MATMUL_DESC_EPILOGUE as EPILOGUE, CUBLASLT_MATMUL_DESC_TRANSA as TRANSPOSED,
        };
        let [rows, features, inputs] = key.shape.map(u64::from);
        let [of_x, of_weight, of_out] = key.strides.map(u64::cast_signed);
        let [from, to] = key.dtypes.map(element);
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let product = result::create_matmul_desc(compute, sys::cudaDataType::CUDA_R_32F)
            .map_err(refused("cublasLtMatmulDescCreate"))?;
        let none = Handle(std::ptr::null_mut());
        let algorithm = sys::cublasLtMatmulAlgo_t { data: [0; 8] };
        // from here on dropping it destroys what there is
        let mut plan = Self { product: Handle(product), layouts: [none; 3], algorithm };
        let matrices =
            [(from, inputs, features, of_weight), (from, inputs, rows, of_x), (to, features, rows, of_out)];
        for (layout, (dtype, column, columns, stride)) in plan.layouts.iter_mut().zip(matrices) {
            let created = result::create_matrix_layout(dtype, column, columns, stride);
            *layout = Handle(created.map_err(refused("cublasLtMatrixLayoutCreate"))?);
        }
        plan.set(TRANSPOSED, &TRANSPOSE)?;
        if key.bias {
            plan.set(EPILOGUE, &sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS)?;
        }
        Ok(plan)
    }

    /// An attribute of the product; `value` is of the type that the library wants for it.
    fn set<T>(&self, attribute: sys::cublasLtMatmulDescAttributes_t, value: &T) -> Result<()> {
        // SAFETY: the description lives; as many bytes as the value has.
        unsafe {
            let value: *const T = value;
            result::set_matmul_desc_attribute(self.product.0, attribute, value.cast(), size_of::<T>())
        }
        .map_err(refused("cublasLtMatmulDescSetAttribute"))
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        // SAFETY: created by `described`, and nobody else has them. An error here has nobody to tell.
        unsafe {
            for layout in self.layouts.iter().filter(|layout| !layout.0.is_null()) {
                let _ = result::destroy_matrix_layout(layout.0);
            }
            let _ = result::destroy_matmul_desc(self.product.0);
        }
    }
}

/// Says how much workspace there is, and that addresses are multiples of 16 and no more.
fn prefer(preference: sys::cublasLtMatmulPreference_t) -> std::result::Result<(), CublasError> {
    use sys::cublasLtMatmulPreferenceAttributes_t::{
        CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES as BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES as A,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES as B, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES as C,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES as D,
    };
    let (bytes, aligned) = (WORKSPACE, 16_u32);
    // SAFETY: the preference lives; the first value is a size, the others are words, as the library's documentation says.
    unsafe {
        result::set_matmul_pref_attribute(preference, BYTES, (&raw const bytes).cast(), size_of::<usize>())?;
        for attribute in [A, B, C, D] {
            result::set_matmul_pref_attribute(preference, attribute, (&raw const aligned).cast(), 4)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::Key;
    use tilewright::Dtype;
    use tilewright_kernels::gemm::{GemmParams, Matrix};

    fn product() -> GemmParams {
        let matrix = |address| Matrix { dtype: Dtype::Bf16, address, stride: 64 };
        GemmParams {
            shape: [17, 64, 64],
            x: matrix(256),
            weight: matrix(512),
            bias: None,
            out: matrix(768),
            groups: None,
        }
    }

    #[test]
    fn the_library_is_asked_only_for_what_it_has() {
        assert!(Key::of(&product()).is_some());
        let not = |why: &str, product: GemmParams| assert_eq!(Key::of(&product), None, "{why}");
        not("few rows", GemmParams { shape: [16, 64, 64], ..product() });
        not("no inputs", GemmParams { shape: [17, 64, 0], ..product() });
        not("rows at one place", GemmParams { x: Matrix { stride: 0, ..product().x }, ..product() });
        not("an address", GemmParams { x: Matrix { address: 258, ..product().x }, ..product() });
        not("a stride", GemmParams { out: Matrix { stride: 65, ..product().out }, ..product() });
        not("f32", GemmParams { x: Matrix { dtype: Dtype::F32, ..product().x }, ..product() });
        not("f16 of bf16", GemmParams { out: Matrix { dtype: Dtype::F16, ..product().out }, ..product() });
        not("a bias of another dtype", GemmParams { bias: Some((Dtype::F32, 1024)), ..product() });
        assert!(Key::of(&GemmParams { bias: Some((Dtype::Bf16, 1024)), ..product() }).is_some());
    }
}
