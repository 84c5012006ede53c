//! Products of different sizes in one call: experts of which each has few rows leave most of a GPU idle, one at a time.
//!
//! cuBLAS has the call since CUDA 12.5, for some types. Where it has not, or refuses, products are begun one by one.

use std::ffi::{c_int, c_void};

use cudarc::cublas::sys::{self as blas_sys, cublasStatus_t as Status};
use cudarc::driver::CudaStream;

use super::blas::{blas_type, operation};
use super::products::LANES;
use super::{Cuda, done, lock};
use crate::device::{Device, Engine};
use crate::dtype::Dtype;
use crate::gpu::{DeviceMatrix, DeviceProduct, DeviceStream};

/// Rows of an expert on average, of which the one call is slower than a call for each product: its products are those of an older
/// instruction (BENCHMARKS.md).
const MANY_ROWS: usize = 384;
/// To what addresses of factors and results that are not f32 have to be aligned.
const ALIGN_BYTES: u64 = 16;

/// What is known of the call, and what it needs.
#[derive(Debug, Default)]
pub(super) struct ProductGroups {
    /// Whether the library has it, once somebody has looked.
    is_there: Option<bool>,
    /// Types of factors and results that it has refused.
    refused: Vec<[Dtype; 2]>,
}

impl Cuda {
    /// Begins all of them, if there is a call for them.
    pub(super) fn multiply_together(&self, device: &Device, products: &[DeviceProduct]) -> bool {
        let products: Vec<&DeviceProduct> = products.iter().filter(|product| has_elements(product)).collect();
        // Those of weights' gradients are what is summed over.
        let rows_of = |product: &&DeviceProduct| product.dims()[usize::from(product.a.transposed)];
        let rows: usize = products.iter().map(rows_of).sum();
        if rows >= MANY_ROWS * products.len() {
            return false;
        }
        let mut groups = lock(&self.groups);
        let Some(types) = common_types(&products).filter(|types| !groups.refused.contains(types)) else { return false };
        if !*groups.is_there.get_or_insert_with(has_call) {
            return false;
        }
        match self.begin_together(device, &products) {
            // Types that it has no products for.
            Status::CUBLAS_STATUS_NOT_SUPPORTED | Status::CUBLAS_STATUS_ARCH_MISMATCH => {
                groups.refused.push(types);
                false
            }
            // These very ones: what others are begun by must not depend on whether these came before.
            Status::CUBLAS_STATUS_INVALID_VALUE => false,
            status => {
                done(status.result(), "products of groups");
                true
            }
        }
    }

    /// Begins each by a call of its own, by turns on the stream of kernels and beside it.
    pub(super) fn multiply_side_by_side(&self, products: &[DeviceProduct]) {
        let (mut multiplier, kernels) = (lock(&self.products), self.stream(DeviceStream::Compute));
        if products.len() < 2 {
            return products.iter().for_each(|product| multiplier.multiply(0, product));
        }
        let follow = |stream: &CudaStream, other: &CudaStream| {
            let event = done(other.record_event(None), "recording an event");
            done(stream.wait(&event), "waiting for an event");
        };
        follow(&self.beside, kernels);
        for (number, product) in products.iter().enumerate() {
            multiplier.multiply(number % LANES, product);
        }
        follow(kernels, &self.beside);
    }

    /// Each product is a group of its own.
    fn begin_together(&self, device: &Device, products: &[&DeviceProduct]) -> Status {
        // As in a single product, c^T = b^T a^T.
        let factors: [fn(&DeviceProduct) -> DeviceMatrix; 3] = [|of| of.b, |of| of.a, |of| of.c];
        let pointers: Vec<u64> =
            factors.iter().flat_map(|matrix| products.iter().map(|product| matrix(product).address())).collect();
        let bytes: Vec<u8> = pointers.iter().flat_map(|pointer| pointer.to_ne_bytes()).collect();
        let Engine::Accelerator(gpu) = device.engine() else { unreachable!("products of an accelerator's device") };
        let room = device.take_memory(gpu, bytes.len());
        room.write(0, &bytes);
        let address = room.address();
        let count = products.len();
        let list = |matrix: usize| address + (matrix * count * size_of::<u64>()) as u64;
        let [m, n, k] = [2, 0, 1].map(|dim| of_each(products, |product| product.dims()[dim]));
        let ldb = of_each(products, |product| product.b.cols.max(1));
        let lda = of_each(products, |product| product.a.cols.max(1));
        let ldc = of_each(products, |product| product.c.cols);
        let [of_b, of_a] = factors.first_chunk::<2>().expect("two factors").map(|matrix| {
            products.iter().map(|product| operation(&matrix(product))).collect::<Vec<blas_sys::cublasOperation_t>>()
        });
        let (ones, sizes) = (vec![1.0f32; count], vec![1 as c_int; count]);
        let keep: Vec<f32> = products.iter().map(|product| f32::from(u8::from(product.accumulate))).collect();
        let DeviceProduct { a, b, c, .. } = products[0];
        let handle = lock(&self.blas);
        self.stream(DeviceStream::Compute);
        // SAFETY: the matrices lie in their memory, as `dims` has checked, and results are apart; lists of the host have an
        // element of each product and are read before the call returns; those of the device are used in the stream's order.
        let status = unsafe {
            blas_sys::cublasGemmGroupedBatchedEx(
                handle.0,
                of_b.as_ptr(),
                of_a.as_ptr(),
                m.as_ptr(),
                n.as_ptr(),
                k.as_ptr(),
                ones.as_ptr().cast(),
                list(0) as *const *const c_void,
                blas_type(b),
                ldb.as_ptr(),
                list(1) as *const *const c_void,
                blas_type(a),
                lda.as_ptr(),
                keep.as_ptr().cast(),
                list(2) as *const *mut c_void,
                blas_type(c),
                ldc.as_ptr(),
                count as c_int,
                sizes.as_ptr(),
                blas_sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
            )
        };
        // Whoever takes this memory next uses it on the same stream.
        device.give_memory(room);
        status
    }
}

fn of_each(products: &[&DeviceProduct], number: impl Fn(&DeviceProduct) -> usize) -> Vec<c_int> {
    products.iter().map(|product| number(product) as c_int).collect()
}

fn has_elements(product: &DeviceProduct) -> bool {
    let [rows, _, cols] = product.dims();
    rows > 0 && cols > 0
}

/// The types of factors and results, if there are several products, all of the same types and where the call can be told to
/// find them.
fn common_types(products: &[&DeviceProduct]) -> Option<[Dtype; 2]> {
    let types = |product: &DeviceProduct| [product.a, product.c].map(|of| of.elements.dtype());
    let is_aligned = |of: &DeviceMatrix| of.elements.dtype() == Dtype::F32 || of.address().is_multiple_of(ALIGN_BYTES);
    let fits = |product: &&&DeviceProduct| {
        types(product) == types(products[0]) && [product.a, product.b, product.c].iter().all(is_aligned)
    };
    (products.len() > 1 && products.iter().filter(fits).count() == products.len()).then(|| types(products[0]))
}

fn has_call() -> bool {
    // SAFETY: the library was found when the engine was made; the function is looked for and not called.
    unsafe { blas_sys::culib().get::<unsafe extern "C" fn()>(b"cublasGemmGroupedBatchedEx\0").is_ok() }
}
