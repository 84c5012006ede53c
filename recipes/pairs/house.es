Un extraño espera en el puente.
El hombre viejo trabaja cerca de la iglesia.
No queda azúcar.
La tienda vende zapatos y sombreros.
El perro come en la cocina.
Un niño duerme bajo el árbol.
El té está listo.
Abre la puerta, hace calor fuera.
Mi hermano duerme bajo el árbol.
La reina come en el puente.
El hombre viejo está sentado bajo el árbol.
¿Puedes ayudarme, por favor?
Las palabras se olvidan fácilmente.
Nuestro vecino canta cerca de la iglesia.
Mi hermano come cerca de la iglesia.
Un niño canta en el puente.
Un extraño come cerca de la iglesia.
Mi hermano duerme cerca de la iglesia.
Nuestro vecino come bajo el árbol.
Bebemos agua y comemos pan.
Un extraño come en el puente.
Un extraño trabaja bajo el árbol.
Un niño come en la cocina.
El hombre viejo canta en la cocina.
Un barco cruza el río.
El último autobús se ha ido.
La reina está sentada en el puente.
Nuestro vecino está sentado cerca de la iglesia.
La reina canta en el puente.
El hombre viejo duerme bajo el árbol.
Nuestro vecino está sentado bajo el árbol.
El hombre viejo duerme cerca de la iglesia.
Mi abuela cuenta historias antiguas.
Mi hermano canta en el puente.
El hombre viejo come bajo el árbol.
Un extraño come detrás de la casa.
La reina trabaja bajo el árbol.
Nuestro vecino espera cerca de la iglesia.
El tren sale a las ocho.
El hombre viejo canta en el puente.
El perro canta en el puente.
Mi hermano espera cerca de la iglesia.
Mi hermano está sentado detrás de la casa.
Su voz es suave pero clara.
El perro come en el puente.
Un niño come en el jardín.
El perro trabaja bajo el árbol.
Ayer caminamos por el bosque.
¿Cómo estás hoy?
No sé su nombre.
Todo está en su sitio.
Un extraño está sentado en la cocina.
Un extraño duerme cerca de la iglesia.
Un extraño espera en la cocina.
Cantan porque están felices.
Nuestro vecino canta en la cocina.
La reina está sentada detrás de la casa.
Cierra la ventana, por favor.
El gato duerme en el puente.
El hombre viejo está sentado cerca de la iglesia.
Un amigo de la escuela nos visitó. Se quedó a almorzar.
He perdido mis gafas.
Nuestro vecino canta bajo el árbol.
El pan está fresco.
Ella lee una carta larga.
El médico hace muchas preguntas.
Un extraño espera detrás de la casa.
Él escribe con un bolígrafo rojo.
El hombre viejo trabaja bajo el árbol.
El perro está sentado en la cocina.
En otoño las hojas son rojas.
Un niño espera en el jardín.
Mi hermano come en la cocina.
El perro trabaja cerca de la iglesia.
El gato come en el puente.
Un extraño canta cerca de la iglesia.
El gato canta detrás de la casa.
El perro espera en el jardín.
El perro canta en la cocina.
Un niño come bajo el árbol.
Mi hermano canta bajo el árbol.
Mi hermano trabaja en el puente.
La reina espera en el puente.
Un extraño canta en el jardín.
Las manzanas cuestan dos euros.
Mi hermano canta en el jardín.
El reloj va cinco minutos atrasado.
El gato canta en el puente.
El perro espera en la cocina.
El gato canta en el jardín.
Un niño come cerca de la iglesia.
El lago es profundo y frío.
El mercado abre el sábado.
El gato espera en el jardín.
Nuestro vecino está sentado en el puente.
El hombre viejo duerme detrás de la casa.
El gato come bajo el árbol.
Mi hermano duerme en el puente.
La respuesta está en la página siguiente.
Un extraño duerme en la cocina.
La reina duerme en el jardín.
Un niño duerme en el puente.
Ella compró un paraguas amarillo.
Mi hermana vive en un pueblo pequeño.
El perro está sentado en el puente.
La carretera estaba vacía. Condujimos rápido.
El viento fue fuerte anoche.
Él toca el violín cada noche.
El perro canta detrás de la casa.
El hombre viejo trabaja en el puente.
Nuestro vecino canta detrás de la casa.
El perro come cerca de la iglesia.
El puente es más viejo que la ciudad.
El hombre viejo está sentado en la cocina.
La reina canta en el jardín.
El gato espera detrás de la casa.
Un extraño come en la cocina.
El hombre viejo come en el puente.
El gato está sentado cerca de la iglesia.
Nuestro vecino duerme en el jardín.
Mi hermano está sentado cerca de la iglesia.
Un extraño espera cerca de la iglesia.
Nuestro vecino está sentado en la cocina.
La reina espera bajo el árbol.
El hombre viejo espera en la cocina.
Esperamos una hora.
Buenas noches, hijos míos.
El granjero tiene doce vacas.
Mi hermano trabaja bajo el árbol.
El perro come en el jardín.
El perro espera en el puente.
Un niño está sentado en el puente.
El hombre viejo espera en el jardín.
Nuestro vecino duerme cerca de la iglesia.
El gato está sentado bajo el árbol.
Mi hermano trabaja en el jardín.
Un niño trabaja cerca de la iglesia.
El hombre viejo duerme en la cocina.
Nuestro vecino espera en la cocina.
Mi hermano espera detrás de la casa.
El perro trabaja en el puente.
Un extraño duerme en el puente.
Nuestro vecino está sentado en el jardín.
Mi hermano duerme en la cocina.
La llave está debajo de la piedra.
Tenemos hambre.
Esta silla está rota.
Un niño está sentado cerca de la iglesia.
El hombre viejo come en la cocina.
El gato trabaja bajo el árbol.
La reina trabaja en el puente.
El gato come detrás de la casa.
El maestro conoce a cada alumno.
La reina trabaja en el jardín.
Un extraño está sentado en el puente.
El perro canta en el jardín.
La reina duerme en el puente.
Un extraño está sentado en el jardín.
El gato está sentado en el puente.
El perro duerme en el puente.
Un niño come en el puente.
Mi hermano duerme en el jardín.
El perro canta cerca de la iglesia.
Estoy muy cansado.
El hombre viejo espera cerca de la iglesia.
El gato duerme cerca de la iglesia.
La nieve está sobre el tejado.
El perro espera cerca de la iglesia.
El perro está sentado bajo el árbol.
Un niño trabaja en el jardín.
Mi hermano trabaja cerca de la iglesia.
El gato está sentado en la cocina.
Necesitamos una mesa más grande.
¿Dónde está la estación?
Un niño espera cerca de la iglesia.
El hombre viejo canta cerca de la iglesia.
La reina come en el jardín.
La reina está sentada cerca de la iglesia.
El perro come bajo el árbol.
Mi hermano come en el puente.
La sopa está demasiado caliente.
El hombre viejo canta bajo el árbol.
La reina espera cerca de la iglesia.
El gato trabaja detrás de la casa.
Nuestro vecino trabaja bajo el árbol.
El perro canta bajo el árbol.
Un extraño está sentado bajo el árbol.
La reina duerme detrás de la casa.
La reina come detrás de la casa.
Mi hermano come bajo el árbol.
La reina espera en la cocina.
El gato canta en la cocina.
El hombre viejo espera bajo el árbol.
La reina duerme cerca de la iglesia.
Un niño duerme en la cocina.
La luz del pasillo está encendida.
El perro trabaja en el jardín.
La reina come bajo el árbol.
El perro espera bajo el árbol.
Nuestro vecino espera detrás de la casa.
El hombre viejo espera detrás de la casa.
Mi hermano trabaja detrás de la casa.
Un extraño está sentado detrás de la casa.
Un extraño duerme detrás de la casa.
Un extraño trabaja en el jardín.
El gato duerme detrás de la casa.
El gato espera en la cocina.
El panadero se levanta muy temprano.
La reina come cerca de la iglesia.
El hombre viejo duerme en el jardín.
Un extraño está sentado cerca de la iglesia.
El perro trabaja detrás de la casa.
El hombre viejo come detrás de la casa.
Las estrellas brillan esta noche.
El hombre viejo duerme en el puente.
Volveré mañana.
La primavera llega tarde este año.
Nuestro vecino espera en el puente.
El hombre viejo come en el jardín.
Un niño canta detrás de la casa.
La reina canta bajo el árbol.
Aprendemos un idioma nuevo.
El camino a la montaña está cerrado.
El gato espera bajo el árbol.
El perro está sentado cerca de la iglesia.
El perro duerme bajo el árbol.
Nuestro vecino canta en el jardín.
Mi hermano trabaja en la cocina.
Nuestro vecino trabaja en la cocina.
El hombre viejo está sentado en el puente.
Nuestro vecino trabaja en el puente.
Nadie respondió a la pregunta.
El gato come en la cocina.
La reina trabaja en la cocina.
Un extraño trabaja cerca de la iglesia.
Nuestro vecino espera en el jardín.
La reina espera detrás de la casa.
El gato espera cerca de la iglesia.
Mi hermano espera en el puente.
Nuestro vecino come en la cocina.
Oigo música de la calle.
Mi hermano está sentado en el jardín.
Nuestro vecino come en el puente.
Un niño está sentado en el jardín.
Está lloviendo otra vez.
Mi hermano está sentado bajo el árbol.
Un niño canta en la cocina.
Mi hermano come en el jardín.
El gato duerme en el jardín.
Me duele una muela.
La reina duerme bajo el árbol.
Nuestro vecino come detrás de la casa.
El perro espera detrás de la casa.
Nuestro vecino canta en el puente.
Mi hermano come detrás de la casa.
Nuestro vecino duerme detrás de la casa.
Nuestro vecino trabaja detrás de la casa.
Buenos días.
El hombre viejo está sentado detrás de la casa.
El hombre viejo espera en el puente.
