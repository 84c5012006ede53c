//! Adapters as PEFT reads them: those of a projection are of the module that has it; those of a layer's routed experts are
//! of the stacked parameters that transformers keeps, all experts behind one another.
//!
//! ```text
//!  here    experts.{e}.w13.lora_A [r, D]               there    experts.base_layer.lora_A [E r, D]     row e r + i
//!          experts.{e}.{w1,w3}.lora_B [F, r]                    experts.base_layer.lora_B [2 F, r E]   column i E + e
//!          experts.{e}.w2.lora_{A,B}                            experts.lora_{A,B}
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde_json::json;

use super::Error;
use super::export::family;
use super::families::ForeignFamily;
use super::folder::ModelFolder;
use super::write::fitted;
use crate::checkpoint::{ElementType, NewFolder, TensorCut, TensorKind, TensorList, write_tensors};
use crate::config::StorageType;
use crate::lora::{self, FACTORS, factors_of};

const CONFIG: &str = "adapter_config.json";
/// What PEFT puts before the names of transformers.
const PREFIX: &str = "base_model.model.";

/// What an export of adapters has made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportedAdapters {
    pub family: &'static str,
    pub tensors: usize,
    pub elements: usize,
}

/// The factors of one module, or of one stacked parameter of it.
#[derive(Debug, Default)]
struct ModuleFactors {
    a: Vec<f32>,
    b: Vec<f32>,
    /// Of A, then of B.
    shapes: [[usize; 2]; 2],
}

/// Writes the adapters of a checkpoint as `folder`, which must not exist, with elements of `dtype` or of the type of the
/// model's. Either the folder is whole or it has no such name.
///
/// # Errors
/// A model without adapters, or with some that no module of its family has; what cannot be read or written.
pub fn export_adapters(
    model: &ModelFolder,
    dtype: Option<ElementType>,
    folder: &Path,
) -> Result<ExportedAdapters, Error> {
    let own = match model.config.train.dtype {
        StorageType::F32 => ElementType::F32,
        StorageType::Bf16 => ElementType::Bf16,
    };
    let (dtype, of) = (dtype.unwrap_or(own), || model.folder.clone());
    let lora = model.config.lora.as_ref().ok_or_else(|| Error::NoAdapters { folder: of() })?;
    let (base, _) = model.clone().merged();
    let (family, _) = family(&base, "float32")?;
    let modules = Modules::of(model, &base, family)?;
    let mut tensors = TensorList::new();
    for (name, factors) in &modules.factors {
        for (factor, shape) in FACTORS.iter().zip(factors.shapes) {
            tensors.insert(format!("{PREFIX}{name}.{factor}"), (dtype, shape.to_vec()));
        }
    }
    let config = modules.config(lora, model);
    let small = vec![(CONFIG.to_owned(), config)];
    let (kind, file_bytes, fingerprint) = (TensorKind::Adapter, u64::MAX, None);
    let new = NewFolder { folder, kind, tensors: &tensors, file_bytes, small, fingerprint };
    write_tensors(new, |name| fitted(name, (ElementType::F32, modules.bytes(name)), dtype))?;
    let elements = tensors.values().map(|(_, shape)| shape.iter().product::<usize>()).sum();
    Ok(ExportedAdapters { family: family.model_type, tensors: tensors.len(), elements })
}

/// All modules with adapters.
#[derive(Debug, Default)]
struct Modules {
    /// By the name that PEFT gives the adapter's module.
    factors: BTreeMap<String, ModuleFactors>,
    /// Names there of modules with adapters, and of those without.
    adapted: BTreeSet<String>,
    plain: BTreeSet<String>,
    /// Names within a layer of parameters, stacked ones or a module's own.
    parameters: BTreeSet<String>,
}

impl Modules {
    fn of(model: &ModelFolder, base: &ModelFolder, family: &'static ForeignFamily) -> Result<Modules, Error> {
        let (mut modules, mut problems) = (Modules::default(), Vec::new());
        let (tensors, experts) =
            (model.files.list(), model.config.moe.as_ref().map_or(1, |moe| moe.experts.smallest()));
        let has_experts = model.config.moe.is_some();
        let read = |name: &String| Ok::<Vec<f32>, Error>(tensors[name].0.values(&model.files.read(name)?).collect());
        for (name, (_, shape)) in base.files.list() {
            let factors = factors_of(&name, |factor| tensors.contains_key(factor));
            match (factors, family.module(&name, experts)) {
                (None, place) => modules.plain.extend(place.map(|(there, _)| module(&there).to_owned())),
                (Some(_), None) => problems.push(format!("{name} is no matrix by itself")),
                (Some([a, b]), Some((there, cut))) => {
                    let rank = tensors[&a].1[0];
                    let own =
                        ModuleFactors { a: read(&a)?, b: read(&b)?, shapes: [[rank, shape[1]], [shape[0], rank]] };
                    match cut.stack {
                        None => modules.adapt(module(&there), own, has_experts),
                        Some(expert) => modules.stack(&there, &cut, expert, &own),
                    }
                }
            }
        }
        let (folder, family) = (model.folder.clone(), family.model_type);
        if problems.is_empty() { Ok(modules) } else { Err(Error::NoModule { folder, family, problems }) }
    }

    /// Gives a module its adapter. In models with experts PEFT takes modules of such names for experts before they were
    /// stacked, so that the weights of those beside experts and of dense layers are named as parameters.
    fn adapt(&mut self, module: &str, factors: ModuleFactors, has_experts: bool) {
        let is_mistaken = ["gate_proj", "up_proj", "down_proj"].iter().any(|name| module.ends_with(name));
        match has_experts && is_mistaken {
            true => drop(self.parameters.insert(format!("{}.weight", within_layer(module)))),
            false => drop(self.adapted.insert(module.to_owned())),
        }
        self.factors.insert(module.to_owned(), factors);
    }

    /// Puts the factors of one of several experts, or of a part of it, where they belong among those of a stacked parameter.
    fn stack(&mut self, parameter: &str, cut: &TensorCut, [expert, all]: [usize; 2], own: &ModuleFactors) {
        let (module, name) = parameter.rsplit_once('.').expect("a parameter of a module");
        self.parameters.insert(format!("{}.{name}", within_layer(module)));
        // Of two parameters of a module the first is the inner one.
        let adapter = if cut.part[1] > 1 { format!("{module}.base_layer") } else { module.to_owned() };
        let [[rank, inputs], [rows, _]] = own.shapes;
        let [part, parts] = cut.part;
        let stacked = self.factors.entry(adapter).or_insert_with(|| ModuleFactors {
            a: vec![0.0; all * rank * inputs],
            b: vec![0.0; rows * parts * rank * all],
            shapes: [[all * rank, inputs], [rows * parts, rank * all]],
        });
        stacked.a[expert * rank * inputs..][..rank * inputs].copy_from_slice(&own.a);
        for (row, values) in own.b.chunks_exact(rank).enumerate() {
            let row = if cut.in_turn { row * parts + part } else { part * rows + row };
            let columns = values.iter().enumerate();
            columns.for_each(|(column, value)| stacked.b[(row * rank + column) * all + expert] = *value);
        }
    }

    /// `adapter_config.json`.
    fn config(&self, lora: &lora::Config, model: &ModelFolder) -> Vec<u8> {
        let last = |module: &String| module.rsplit('.').next().unwrap_or(module).to_owned();
        let plain: BTreeSet<String> = self.plain.iter().map(last).collect();
        // By their last names, if no other module has one of these.
        let short: BTreeSet<String> = self.adapted.iter().map(last).collect();
        let targets = if short.is_disjoint(&plain) { &short } else { &self.adapted };
        let reads = model.config.model.blueprint().reads_a_source();
        let config = json!({
            "peft_type": "LORA",
            "task_type": if reads { "SEQ_2_SEQ_LM" } else { "CAUSAL_LM" },
            "base_model_name_or_path": model.config.train.init,
            "r": lora.rank,
            "lora_alpha": lora.alpha(),
            "target_modules": targets,
            "target_parameters": if self.parameters.is_empty() { None } else { Some(&self.parameters) },
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": false,
            "init_lora_weights": true,
            "use_rslora": false,
            "use_dora": false,
            "inference_mode": true,
        });
        serde_json::to_vec_pretty(&config).expect("names and numbers are plain JSON")
    }

    /// The elements of a tensor there, in f32.
    fn bytes(&self, name: &str) -> Vec<u8> {
        let own = name.strip_prefix(PREFIX).expect("names that were made here");
        let factor = |number: usize| self.factors.get(own.strip_suffix(FACTORS[number])?.strip_suffix('.')?);
        let values = factor(0).map(|it| &it.a).or_else(|| factor(1).map(|it| &it.b)).expect("a factor");
        values.iter().flat_map(|value| value.to_le_bytes()).collect()
    }
}

/// What follows the number of its layer in the name of a module of a decoder.
fn within_layer(module: &str) -> &str {
    module.splitn(4, '.').last().unwrap_or(module)
}

/// The module of a weight's name.
fn module(name: &str) -> &str {
    name.strip_suffix(".weight").unwrap_or(name)
}
