//! The kernels' CUDA C, as it lies in `kernels/`.

macro_rules! sources {
    ($($module:literal),* $(,)?) => {
        /// Each with the module of the table whose kernels it has.
        pub(super) const MODULES: &[(&str, &str)] =
            &[$(($module, include_str!(concat!("kernels/", $module, ".cu")))),*];
    };
}

sources![
    "activation",
    "adamw",
    "attention",
    "cached_attention",
    "columns",
    "cross_entropy",
    "denorm",
    "elementwise",
    "embedding",
    "exchange",
    "flash_attention",
    "gather",
    "grouped",
    "grouped_swiglu",
    "norm",
    "product",
    "relative_attention",
    "select",
    "softmax",
    "stored",
    "variation",
];

/// What they include.
pub(super) const HEADERS: &[(&str, &str)] = &[
    ("attention.cuh", include_str!("kernels/attention.cuh")),
    ("common.cuh", include_str!("kernels/common.cuh")),
    ("host.h", include_str!("kernels/host.h")),
    ("lines.cuh", include_str!("kernels/lines.cuh")),
    ("rows.cuh", include_str!("kernels/rows.cuh")),
    ("tensor_cores.cuh", include_str!("kernels/tensor_cores.cuh")),
    ("tiles.cuh", include_str!("kernels/tiles.cuh")),
];

/// A file of kernels.
#[derive(Clone, Debug)]
pub(super) struct KernelSource {
    pub(super) module: &'static str,
    pub(super) text: String,
}

pub(super) fn all() -> Vec<KernelSource> {
    MODULES.iter().map(|&(module, text)| KernelSource { module, text: text.to_owned() }).collect()
}
